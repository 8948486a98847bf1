// Tiles that were loaded, the last used kept: for drawing again in other colours, and to read values under the pointer.

import { isAbort, PLANES, TILE, type TileAddress } from "../data/source";

const KEPT = 128; // tiles of 768 kB

type Load = (tile: TileAddress, signal?: AbortSignal) => Promise<Float32Array>;

class TileCache {
  private readonly loaded = new Map<string, Float32Array>();
  private readonly loading = new Map<string, Promise<Float32Array>>();

  peek(name: string): Float32Array | undefined {
    return this.loaded.get(name);
  }

  async get(name: string, tile: TileAddress, load: Load, signal?: AbortSignal): Promise<Float32Array> {
    const kept = this.loaded.get(name);
    if (kept) {
      this.keep(name, kept);
      return kept;
    }
    let promise = this.loading.get(name);
    if (!promise) {
      promise = load(tile, signal).finally(() => this.loading.delete(name));
      this.loading.set(name, promise);
    }
    try {
      const values = await promise;
      this.keep(name, values);
      return values;
    } catch (error) {
      // Another map gave up a tile that this one still wants.
      if (isAbort(error) && !signal?.aborted) return this.get(name, tile, load, signal);
      throw error;
    }
  }

  private keep(name: string, values: Float32Array): void {
    this.loaded.delete(name);
    this.loaded.set(name, values);
    for (const oldest of this.loaded.keys()) {
      if (this.loaded.size <= KEPT) break;
      this.loaded.delete(oldest);
    }
  }
}

export const cache = new TileCache();

/** A map that can be drawn: its name (what it shows, of which head and scene), its length, and how to load its tiles. */
export interface Layer {
  name: string;
  length: number;
  load: Load;
}

export function tileName(layer: Layer, tile: TileAddress): string {
  return `${layer.name}/${tile.level}/${tile.row}/${tile.column}`;
}

export interface Cell {
  size: number; // entries along a side
  low: number;
  mean: number;
  high: number;
}

/** The cell of an entry at a level, if its tile is loaded; NaN where no key is seen. */
export function cellAt(layer: Layer, level: number, query: number, key: number): Cell | null {
  const [i, j] = [query >> level, key >> level];
  const tile = { level, row: Math.floor(i / TILE), column: Math.floor(j / TILE) };
  const values = cache.peek(tileName(layer, tile));
  if (!values) return null;
  const at = (i % TILE) * TILE + (j % TILE);
  const [low, mean, high] = [PLANES.low, PLANES.mean, PLANES.high].map((plane) => values[plane * TILE * TILE + at]!);
  return { size: 2 ** level, low: low!, mean: mean!, high: high! };
}
