// The running server of relpos explore.

import type { Place, Source, TileAddress } from "./source";
import { Refusal, TILE } from "./source";
import type { Colours, Evaluation, GalleryEntry, HeadDetail, LayerSummary, Row, Scene, SceneRequest, Show, Start } from "./types";

const GONE = 410;

export class ServerSource implements Source {
  readonly live = true;
  private readonly requests = new Map<string, SceneRequest>(); // of every scene of this page, to ask for it again

  constructor(
    private readonly base: string,
    private readonly token: string | null,
  ) {}

  start(): Promise<Start> {
    return this.json("start");
  }

  async gallery(onEntry: (entry: GalleryEntry) => void, signal?: AbortSignal): Promise<void> {
    await lines(await refused(await this.fetch("gallery", { signal })), onEntry);
  }

  async scene(request: SceneRequest, signal?: AbortSignal, task?: string): Promise<Scene> {
    return this.remember(await this.post<Scene>("scenes", request, signal, task));
  }

  async progress(task: string): Promise<number | null> {
    return (await this.json<{ done: number | null }>(`tasks/${task}`)).done;
  }

  async cancel(task: string): Promise<void> {
    await this.post(`tasks/${task}/cancel`, {});
  }

  async write(scene: string, tokens: number): Promise<Scene> {
    const answer = await this.retried(scene, () => this.fetch(`scenes/${scene}/write`, this.body({ tokens })));
    return this.remember((await answer.json()) as Scene);
  }

  async overview(scene: string, show: Show, layer: number | null, side: number, onLayer: (layer: LayerSummary) => void, signal?: AbortSignal): Promise<void> {
    const layers = layer === null ? "" : `&layers=${layer}-${layer}`;
    await lines<LayerSummary>(await this.get(scene, `scenes/${scene}/overview?show=${show}&side=${side}${layers}`, signal), onLayer);
  }

  head(place: Place, options: { mass: boolean; plain: boolean }, signal?: AbortSignal, task?: string): Promise<HeadDetail> {
    const query = `show=${place.show}${options.mass ? "" : "&mass=0"}${options.plain ? "&colours=plain" : ""}`;
    return this.json(`scenes/${place.scene}/head/${place.layer}/${place.head}?${query}`, place.scene, signal, task);
  }

  tile(place: Place, tile: TileAddress, signal?: AbortSignal): Promise<Float32Array> {
    const head = `${place.show}/${place.layer}/${place.head}`;
    return this.floats(`scenes/${place.scene}/tiles/${head}/${path(tile)}`, [place.scene], signal);
  }

  row(place: Place, query: number, signal?: AbortSignal): Promise<Row> {
    const head = `${place.show}/${place.layer}/${place.head}`;
    return this.json(`scenes/${place.scene}/row/${head}/${query}`, place.scene, signal);
  }

  async value(place: Place, query: number, key: number, signal?: AbortSignal): Promise<number | null> {
    const address = `scenes/${place.scene}/value/${place.show}/${place.layer}/${place.head}/${query}/${key}`;
    return (await this.json<{ value: number | null }>(address, place.scene, signal)).value;
  }

  async tokens(scene: string, first: number, count: number, signal?: AbortSignal): Promise<string[]> {
    const address = `scenes/${scene}/tokens?first=${first}&count=${count}`;
    return (await this.json<{ tokens: string[] }>(address, scene, signal)).tokens;
  }

  async differenceRange(a: Place, b: Place, signal?: AbortSignal): Promise<Colours> {
    const answer = await this.retriedAll([a.scene, b.scene], () =>
      this.fetch(`difference/${a.scene}/${b.scene}/head/${pair(a, b)}`, { signal }),
    );
    return (await answer.json()) as Colours;
  }

  differenceTile(a: Place, b: Place, tile: TileAddress, signal?: AbortSignal): Promise<Float32Array> {
    const scenes = [a.scene, b.scene];
    return this.floats(`difference/${scenes.join("/")}/tiles/${pair(a, b)}/${path(tile)}`, scenes, signal);
  }

  evaluation(subject: string): Promise<Evaluation> {
    return this.json(`subjects/${subject}/evaluation`);
  }

  async file(place: Place, kind: "png" | "svg" | "csv", options: Record<string, string>): Promise<Blob> {
    const query = new URLSearchParams({ show: place.show, ...options }).toString();
    const address = `scenes/${place.scene}/export/${place.layer}/${place.head}.${kind}?${query}`;
    return (await this.get(place.scene, address)).blob();
  }

  private remember(scene: Scene): Scene {
    this.requests.set(scene.scene, scene.request);
    return scene;
  }

  private body(content: unknown): RequestInit {
    return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) };
  }

  private async post<T>(address: string, content: unknown, signal?: AbortSignal, task?: string): Promise<T> {
    return (await refused(await this.fetch(address, { ...this.body(content), signal }, task))).json() as Promise<T>;
  }

  private async json<T>(address: string, scene?: string, signal?: AbortSignal, task?: string): Promise<T> {
    const answer = scene ? await this.get(scene, address, signal, task) : await refused(await this.fetch(address, { signal }, task));
    return answer.json() as Promise<T>;
  }

  private async floats(address: string, scenes: string[], signal?: AbortSignal): Promise<Float32Array> {
    const answer = await this.retriedAll(scenes, () => this.fetch(address, { signal }));
    const bytes = await answer.arrayBuffer();
    if (bytes.byteLength !== 3 * TILE * TILE * 4) throw new Refusal("A tile from the server has the wrong size: reload the page.");
    return new Float32Array(bytes);
  }

  private get(scene: string, address: string, signal?: AbortSignal, task?: string): Promise<Response> {
    return this.retried(scene, () => this.fetch(address, { signal }, task));
  }

  private retried(scene: string, ask: () => Promise<Response>): Promise<Response> {
    return this.retriedAll([scene], ask);
  }

  /** Asks; if a scene was evicted, recreates it and retries. */
  private async retriedAll(scenes: string[], ask: () => Promise<Response>): Promise<Response> {
    const answer = await ask();
    if (answer.status !== GONE) return refused(answer);
    for (const scene of scenes) {
      const request = this.requests.get(scene);
      if (request) await this.post("scenes", request);
    }
    return refused(await ask());
  }

  private fetch(address: string, options: RequestInit = {}, task?: string): Promise<Response> {
    const headers = new Headers(options.headers);
    if (task) headers.set("X-Relpos-Task", task);
    if (this.token) headers.set("X-Relpos-Token", this.token);
    return fetch(`${this.base}api/${address}`, { ...options, headers });
  }
}

function path(tile: TileAddress): string {
  return `${tile.level}/${tile.row}/${tile.column}`;
}

function pair(a: Place, b: Place): string {
  return `${a.show}/${a.layer}/${a.head}/${b.layer}/${b.head}`;
}

/** Reads lines of JSON as they arrive. */
async function lines<T extends object>(answer: Response, onLine: (line: T) => void): Promise<void> {
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const parts = (rest + (value ?? "")).split("\n");
    rest = done ? "" : (parts.pop() ?? "");
    for (const part of parts) {
      if (!part.trim()) continue;
      const line = JSON.parse(part) as T | { error: string };
      if ("error" in line && Object.keys(line).length === 1) throw new Refusal(line.error);
      onLine(line as T);
    }
    if (done) return;
  }
}

async function refused(answer: Response): Promise<Response> {
  if (answer.ok) return answer;
  let message = `The server answered with status ${answer.status}.`;
  try {
    const content = (await answer.json()) as { error?: unknown };
    if (typeof content.error === "string") message = content.error;
  } catch {
    // not JSON: the status says it
  }
  throw new Refusal(message);
}
