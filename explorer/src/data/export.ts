// An exported file: everything is inlined in the page, as JSON, with maps as compressed bytes.

import { Pyramid } from "./pyramid";
import type { Place, Source, TileAddress } from "./source";
import { Refusal, topLevel } from "./source";
import { FLAT_RANGE } from "./types";
import { ticksOf } from "../map/colours";
import type { Colours, Evaluation, ExportData, HeadDetail, LayerSummary, Row, Scene, SceneRequest, Show, Start, StoredMap } from "./types";

const KEPT = 12; // maps held uncompressed
const FIXED = "This file holds only the inputs it was exported with. Run relpos explore for others.";

export class ExportSource implements Source {
  readonly live = false;
  private readonly pyramids = new Map<string, Promise<Pyramid>>();

  constructor(private readonly data: ExportData) {}

  async start(): Promise<Start> {
    return this.data.start;
  }

  async gallery(): Promise<void> {}

  async progress(): Promise<null> {
    return null;
  }

  async cancel(): Promise<void> {}

  async scene(request: SceneRequest): Promise<Scene> {
    const scene = this.data.scenes.find((one) => one.request.subject === request.subject);
    if (!scene) throw new Refusal(FIXED);
    return scene;
  }

  async write(): Promise<Scene> {
    throw new Refusal(FIXED);
  }

  async overview(scene: string, show: Show, layer: number | null, _side: number, onLayer: (layer: LayerSummary) => void): Promise<void> {
    for (const summary of found(this.data.overview, `${scene}/${show}`)) if (layer === null || summary.layer === layer) onLayer(summary);
  }

  async head(place: Place): Promise<HeadDetail> {
    return found(this.data.heads, key(place));
  }

  async tile(place: Place, tile: TileAddress): Promise<Float32Array> {
    return (await this.pyramid(place)).tile(tile);
  }

  async row(place: Place, query: number): Promise<Row> {
    return (await this.pyramid(place)).row(query);
  }

  async value(place: Place, query: number, key: number): Promise<number | null> {
    return (await this.pyramid(place)).value(query, key);
  }

  async tokens(scene: string, first: number, count: number): Promise<string[]> {
    return (this.data.tokens[scene] ?? []).slice(first, first + count);
  }

  async differenceRange(a: Place, b: Place): Promise<Colours> {
    const tile = await this.differenceTile(a, b, { level: topLevel(this.length(a.scene)), row: 0, column: 0 });
    let most = FLAT_RANGE / 2;
    for (const value of tile) if (Math.abs(value) > most) most = Math.abs(value);
    const scale = { low: -most, high: most, log: false, ticks: ticksOf(-most, most, 6), extend: "neither" as const };
    return { low: -most, high: most, colour_map: "diverging", log: false, scale };
  }

  async differenceTile(a: Place, b: Place, tile: TileAddress): Promise<Float32Array> {
    const [first, second] = await Promise.all([this.tile(a, tile), this.tile(b, tile)]);
    const plane = first.length / 3;
    // The means differ exactly; minimum and maximum of a difference are not known from those of its parts.
    return first.map((_, n) => first[plane + (n % plane)]! - second[plane + (n % plane)]!);
  }

  async evaluation(subject: string): Promise<Evaluation> {
    return found(this.data.evaluations, subject);
  }

  async file(): Promise<null> {
    return null;
  }

  private length(scene: string): number {
    return this.data.scenes.find((one) => one.scene === scene)?.length ?? 0;
  }

  private pyramid(place: Place): Promise<Pyramid> {
    const name = key(place);
    const kept = this.pyramids.get(name) ?? this.unpack(found(this.data.maps, name), this.length(place.scene));
    this.pyramids.delete(name);
    this.pyramids.set(name, kept); // the last used is the last
    for (const oldest of this.pyramids.keys()) {
      if (this.pyramids.size <= KEPT) break;
      this.pyramids.delete(oldest);
    }
    return kept;
  }

  private async unpack(map: StoredMap, length: number): Promise<Pyramid> {
    const codes = await inflated(map.cells);
    const size = Math.ceil(length / 2 ** map.level);
    const values = decoded(map);
    return new Pyramid(Float32Array.from(codes.subarray(0, size * size), (code) => values[code]!), size, map.level, length);
  }
}

/** The value of each of the 256 codes. */
export function decoded(map: Pick<StoredMap, "low" | "high" | "log">): Float32Array {
  const [low, high] = map.log ? [Math.log(map.low), Math.log(map.high)] : [map.low, map.high];
  return Float32Array.from({ length: 256 }, (_, code) => {
    if (!code) return NaN;
    const value = low + ((high - low) * (code - 1)) / 254;
    return map.log ? Math.exp(value) : value;
  });
}

async function inflated(text: string): Promise<Uint8Array> {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function key(place: Place): string {
  return `${place.scene}/${place.show}/${place.layer}/${place.head}`;
}

function found<T>(entries: Record<string, T>, name: string): T {
  const entry = entries[name];
  if (entry === undefined) throw new Refusal("This file does not hold that. Run relpos explore to see it.");
  return entry;
}
