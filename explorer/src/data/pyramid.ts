// Tiles, rows and values from a whole map in memory: for exported files.

import type { TileAddress } from "./source";
import { TILE } from "./source";
import type { Row } from "./types";

/** A level of a map: three planes of size × size values; NaN where no key is seen. */
interface Level {
  size: number;
  planes: [Float32Array, Float32Array, Float32Array];
  counts: Float32Array; // entries behind each mean
}

export class Pyramid {
  private readonly levels: Level[];

  /** From the finest level that is held: `cells` is size × size, row by row. */
  constructor(
    cells: Float32Array,
    size: number,
    readonly finest: number,
    private readonly length: number,
  ) {
    const counts = Float32Array.from(cells, (value) => (Number.isNaN(value) ? 0 : 1));
    this.levels = [{ size, planes: [cells, cells, cells], counts }];
  }

  tile({ level, row, column }: TileAddress): Float32Array {
    const { size, planes } = this.level(Math.max(0, level - this.finest));
    const shift = Math.max(0, this.finest - level); // the file has nothing finer: its cells are repeated
    const tile = new Float32Array(3 * TILE * TILE).fill(NaN);
    for (let r = 0; r < TILE; r++) {
      const i = (row * TILE + r) >> shift;
      if (i >= size) break;
      for (let c = 0; c < TILE; c++) {
        const j = (column * TILE + c) >> shift;
        if (j >= size) break;
        for (let p = 0; p < 3; p++) tile[(p * TILE + r) * TILE + c] = planes[p]![i * size + j]!;
      }
    }
    return tile;
  }

  value(query: number, key: number): number | null {
    const { size, planes } = this.levels[0]!;
    const value = planes[1][(query >> this.finest) * size + (key >> this.finest)]!;
    return Number.isNaN(value) ? null : value;
  }

  row(query: number): Row {
    const step = 1 << this.finest;
    const mean: (number | null)[] = [];
    for (let key = 0; key < this.length; key += step) mean.push(this.value(query, key));
    while (mean.length && mean[mean.length - 1] === null) mean.pop();
    return { query, first: 0, step, mean, low: mean, high: mean };
  }

  private level(n: number): Level {
    while (this.levels.length <= n) this.levels.push(halved(this.levels[this.levels.length - 1]!));
    return this.levels[n]!;
  }
}

function halved(fine: Level): Level {
  const size = Math.ceil(fine.size / 2);
  const make = () => new Float32Array(size * size).fill(NaN);
  const coarse: Level = { size, planes: [make(), make(), make()], counts: new Float32Array(size * size) };
  for (let i = 0; i < fine.size; i++) {
    for (let j = 0; j < fine.size; j++) {
      const from = i * fine.size + j;
      const count = fine.counts[from]!;
      if (!count) continue;
      const to = (i >> 1) * size + (j >> 1);
      const [low, mean, high] = coarse.planes;
      const total = coarse.counts[to]! + count;
      low[to] = total === count ? fine.planes[0][from]! : Math.min(low[to]!, fine.planes[0][from]!);
      high[to] = total === count ? fine.planes[2][from]! : Math.max(high[to]!, fine.planes[2][from]!);
      mean[to] = total === count ? fine.planes[1][from]! : mean[to]! + ((fine.planes[1][from]! - mean[to]!) * count) / total;
      coarse.counts[to] = total;
    }
  }
  return coarse;
}
