// The source of data and what it said at the start, for every component.

import { getContext, setContext } from "svelte";
import { paletteOf, type Palette } from "../map/colours";
import type { Place, Source } from "./source";
import { SIDE, type ColourMap, type GalleryEntry, type HeadSummary, type Scene, type SceneRequest, type Start, type Subject } from "./types";

const KEPT = 64; // scenes

export class Explorer {
  readonly palettes: Record<ColourMap, Palette>;
  private readonly scenes = new Map<string, Promise<Scene>>();
  private readonly summaries = new Map<string, Promise<HeadSummary[]>>();
  private readonly entries = new Map<string, GalleryEntry>();
  private readonly listeners = new Set<(entry: GalleryEntry) => void>();
  private loading: Promise<unknown> | null = null;

  constructor(
    readonly source: Source,
    readonly start: Start,
  ) {
    const maps = start.colour_maps;
    this.palettes = { sequential: paletteOf(maps.sequential), diverging: paletteOf(maps.diverging), weights: paletteOf(maps.weights) };
  }

  subject(id: string): Subject | null {
    return [...this.start.subjects, ...this.start.examples].find((subject) => subject.id === id) ?? null;
  }

  /** The name of a subject or of an encoding. */
  name(id: string): string {
    return this.subject(id)?.name ?? id;
  }

  /** A scene, asked for once. */
  scene(request: SceneRequest, task?: string): Promise<Scene> {
    const name = JSON.stringify(request);
    let scene = this.scenes.get(name);
    if (!scene) {
      scene = this.source.scene(request, undefined, task);
      scene.catch(() => this.scenes.delete(name));
    }
    this.scenes.delete(name);
    this.scenes.set(name, scene);
    for (const oldest of this.scenes.keys()) {
      if (this.scenes.size <= KEPT) break;
      this.scenes.delete(oldest);
    }
    return scene;
  }

  /** The gallery, asked for once. */
  gallery(onEntry: (entry: GalleryEntry) => void): void {
    for (const entry of this.entries.values()) onEntry(entry);
    this.listeners.add(onEntry);
    this.loading ??= this.source
      .gallery((entry) => {
        this.entries.set(entry.name, entry);
        for (const listener of this.listeners) listener(entry);
      })
      .catch(() => (this.loading = null)); // the next visit asks again
  }

  /** The measures of one head, from the overview of its layer. */
  async summary(place: Place): Promise<HeadSummary | null> {
    const name = `${place.scene}/${place.show}/${place.layer}`;
    let heads = this.summaries.get(name);
    if (!heads) {
      let line: HeadSummary[] = [];
      heads = this.source.overview(place.scene, place.show, place.layer, SIDE, (layer) => (line = layer.heads)).then(() => line);
      heads.catch(() => this.summaries.delete(name));
      if (this.summaries.size > KEPT) this.summaries.clear();
      this.summaries.set(name, heads);
    }
    return (await heads).find((head) => head.head === place.head) ?? null;
  }

  /** Keep a scene that was made in another way, by writing on. */
  keep(scene: Scene): void {
    this.scenes.set(JSON.stringify(scene.request), Promise.resolve(scene));
  }
}

const NAME = Symbol("explorer");
export const provide = (explorer: Explorer): Explorer => setContext(NAME, explorer);
export const useExplorer = (): Explorer => getContext<Explorer>(NAME);
