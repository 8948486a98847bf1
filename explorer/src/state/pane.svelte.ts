// One head on the page: its scene, its numbers, and what lies under the cursor.

import type { Explorer } from "../data/context";
import { isAbort, sentence, type Place } from "../data/source";
import type { HeadDetail, Range, Row, Scene, SceneRequest, Show } from "../data/types";
import { cellAt, type Cell, type Layer } from "../map/tile-cache";
import { format } from "./address";
import { address } from "./store.svelte";
import { Tokens } from "./tokens.svelte";

export const MEASURED = 8_192; // tokens up to which mass and class are asked for: beyond, they take very long
const PAUSE = 60; // ms of a resting cursor before the server is asked about it
const ASKING = 400; // ms between two questions how far a map is
let tasks = 0;

export class PaneModel {
  scene = $state.raw<Scene | null>(null);
  detail = $state.raw<(Range & Partial<HeadDetail>) | null>(null);
  place = $state.raw<Place | null>(null); // what `detail` describes
  tokens = $state.raw<Tokens | null>(null);
  row = $state.raw<Row | null>(null);
  attended = $state.raw<Row | null>(null); // the weights of the row, where there are any
  value = $state.raw<number | null | undefined>(undefined); // undefined: not known yet
  cell = $state.raw<Cell | null>(null);
  error = $state<string | null>(null);
  loading = $state(false);
  done = $state<number | null>(null); // the share of what is computed, where it is known
  layer = $state.raw<Layer | null>(null);
  private task: string | null = null; // that is computed now
  private settled: string | null = null; // the address of what is shown

  constructor(private readonly explorer: Explorer) {}

  /** Load a scene and a head of it. Returns a function that gives it up. */
  load(request: SceneRequest, layer: number, head: number, show: Show | null, plain: boolean): () => void {
    const giveUp = new AbortController();
    const task = `${Date.now().toString(36)}-${++tasks}`;
    [this.loading, this.done, this.task] = [true, null, task];
    const asking = setInterval(() => {
      if (!this.loading) return clearInterval(asking);
      Promise.all([task, `${task}-head`].map((name) => this.explorer.source.progress(name))).then(
        (shares) => (this.done = this.loading && this.task === task ? (shares.find((done) => done !== null) ?? null) : null),
        () => {},
      );
    }, ASKING);
    let over = false;
    void this.loadNow(request, layer, head, show, plain, giveUp.signal, task).finally(() => {
      clearInterval(asking);
      over = true;
    });
    return () => {
      clearInterval(asking);
      giveUp.abort();
      // Other panes may wait for the same scene, but nobody for the numbers of this head.
      if (!over && this.scene) this.explorer.source.cancel(`${task}-head`).catch(() => {});
    };
  }

  /** Give up what is computed, and go back to what is shown. */
  cancel(): void {
    for (const task of this.task ? [this.task, `${this.task}-head`] : []) this.explorer.source.cancel(task).catch(() => {});
    this.loading = false;
    if (this.settled !== null) address.open(this.settled);
  }

  private async loadNow(request: SceneRequest, layer: number, head: number, show: Show | null, plain: boolean, signal: AbortSignal, task: string): Promise<void> {
    const { source } = this.explorer;
    try {
      const scene = await this.explorer.scene(request, task);
      const place: Place = {
        scene: scene.scene,
        show: show && scene.shows.includes(show) ? show : scene.default_show,
        layer: Math.min(layer, scene.layers),
        head: Math.min(head, scene.heads),
      };
      if (signal.aborted) return;
      const detail = await source.head(place, { mass: false, plain }, signal, `${task}-head`);
      if (signal.aborted) return;
      if (this.scene?.scene !== scene.scene) this.tokens = scene.has_tokens ? new Tokens(source, scene.scene, scene.length) : null;
      [this.scene, this.place, this.detail, this.error] = [scene, place, detail, null];
      const name = `${place.scene}/${place.show}/${place.layer}/${place.head}`;
      this.layer = { name, length: scene.length, load: (tile, stop) => source.tile(place, tile, stop) };
      [this.loading, this.settled] = [false, format(address.state)];
      if (scene.length > MEASURED) return;
      const full = await source.head(place, { mass: true, plain }, signal, `${task}-head`); // the mass may take long: the map does not wait for it
      if (!signal.aborted) this.detail = full;
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      this.error = sentence(error);
      this.loading = false;
    }
  }

  /** Read what lies under the cursor: at once from a loaded tile, exactly from the server. */
  read(cursor: { query: number; key: number } | null, level: number): () => void {
    const { place, layer } = this;
    this.cell = cursor && layer ? cellAt(layer, level, cursor.query, cursor.key) : null;
    this.value = undefined;
    if (!cursor || !place || !layer || cursor.query >= layer.length || cursor.key >= layer.length) return () => {};
    const exact = cellAt(layer, 0, cursor.query, cursor.key);
    if (exact) {
      this.value = Number.isNaN(exact.mean) ? null : exact.mean;
      return () => {};
    }
    return this.soon(async (signal) => {
      this.value = await this.explorer.source.value(place, cursor.query, cursor.key, signal);
    });
  }

  /** Read the cell under the cursor again, once its tile is there. */
  readCell(cursor: { query: number; key: number } | null, level: number): void {
    if (cursor && this.layer && !this.cell) this.cell = cellAt(this.layer, level, cursor.query, cursor.key);
  }

  /** Load the row of a query. */
  readRow(query: number | null): () => void {
    const { place, scene } = this;
    if (query === null || !place || !scene || query >= scene.length) {
      [this.row, this.attended] = [null, null];
      return () => {};
    }
    return this.soon(async (signal) => {
      this.row = await this.explorer.source.row(place, query, signal);
      const wanted = scene.has_tokens && place.show !== "weights" && scene.shows.includes("weights");
      this.attended = wanted ? await this.explorer.source.row({ ...place, show: "weights" }, query, signal) : this.row;
    });
  }

  private soon(work: (signal: AbortSignal) => Promise<void>): () => void {
    const giveUp = new AbortController();
    const timer = setTimeout(() => {
      work(giveUp.signal).catch((error: unknown) => {
        if (!giveUp.signal.aborted && !isAbort(error)) this.error = sentence(error);
      });
    }, PAUSE);
    return () => {
      clearTimeout(timer);
      giveUp.abort();
    };
  }
}
