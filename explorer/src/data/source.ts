// Where the page gets its data: from a running server, or from what was inlined into an exported file.

import { TILE } from "./types";
import type { Colours, Evaluation, GalleryEntry, HeadDetail, LayerSummary, Row, Scene, SceneRequest, Show, Start } from "./types";

export { TILE };
export const PLANES = { low: 0, mean: 1, high: 2 } as const;
export type Plane = keyof typeof PLANES;

/** A head of a scene, and what is shown of it. */
export interface Place {
  scene: string;
  show: Show;
  layer: number;
  head: number;
}

export interface TileAddress {
  level: number; // a cell is 2^level × 2^level entries
  row: number;
  column: number;
}

export interface Source {
  /** Whether inputs, lengths and parameters can be changed: an exported file has only what it was made with. */
  readonly live: boolean;
  start(): Promise<Start>;
  /** Every encoding, as it is ready. */
  gallery(onEntry: (entry: GalleryEntry) => void, signal?: AbortSignal): Promise<void>;
  /** Under the name of a task a request can be followed and cancelled. */
  scene(request: SceneRequest, signal?: AbortSignal, task?: string): Promise<Scene>;
  /** The share of a task that is done; null if it does not run. */
  progress(task: string): Promise<number | null>;
  cancel(task: string): Promise<void>;
  /** Continues the input of a scene with tokens that the model writes. */
  write(scene: string, tokens: number): Promise<Scene>;
  /** All layers, or one of them, with small maps of side × side cells. */
  overview(scene: string, show: Show, layer: number | null, side: number, onLayer: (layer: LayerSummary) => void, signal?: AbortSignal): Promise<void>;
  /** The numbers of a head; without its mass and class (null) they are ready at once. Plain: never colours centred on 0. */
  head(place: Place, options: { mass: boolean; plain: boolean }, signal?: AbortSignal, task?: string): Promise<HeadDetail>;
  /** Three planes (minimum, mean, maximum) of TILE × TILE values; NaN where no key is seen. */
  tile(place: Place, tile: TileAddress, signal?: AbortSignal): Promise<Float32Array>;
  row(place: Place, query: number, signal?: AbortSignal): Promise<Row>;
  value(place: Place, query: number, key: number, signal?: AbortSignal): Promise<number | null>;
  tokens(scene: string, first: number, count: number, signal?: AbortSignal): Promise<string[]>;
  differenceRange(a: Place, b: Place, signal?: AbortSignal): Promise<Colours>;
  differenceTile(a: Place, b: Place, tile: TileAddress, signal?: AbortSignal): Promise<Float32Array>;
  evaluation(subject: string): Promise<Evaluation>;
  /** A figure or table made by relpos; null where only the page itself can make it. */
  file(place: Place, kind: "png" | "svg" | "csv", options: Record<string, string>): Promise<Blob | null>;
}

/** The smallest level at which the whole map fits into one tile. */
export function topLevel(length: number): number {
  return Math.max(0, Math.ceil(Math.log2(length / TILE)));
}

/** An error whose message is a sentence for the reader. */
export class Refusal extends Error {}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export function sentence(error: unknown): string {
  if (error instanceof Refusal) return error.message;
  if (error instanceof TypeError) return "The server does not answer. Is relpos explore still running?";
  return error instanceof Error ? error.message : String(error);
}
