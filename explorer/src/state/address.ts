// The address of the page holds its whole state: #/subject/0/head/3/5?show=bias&length=4096&doc=3 …

import type { Plane } from "../data/source";
import type { Input, Parameter, Show } from "../data/types";

/** A head of a subject (by its id, a number) or of an encoding (by its name). */
export interface Pane {
  subject: string;
  layer: number;
  head: number;
}

export interface State {
  page: "home" | "overview" | "head" | "encoding";
  subject: string; // of an overview or a head: a subject's id; of an encoding's page: its name
  layer: number;
  head: number;
  show: Show | null; // null: the subject's own default
  length: number | null;
  input: Input | null;
  seed: number;
  plane: Plane;
  sink: boolean; // whether the first key counts in the colour scale
  cursor: { query: number; key: number } | null;
  view: { x: number; y: number; z: number } | null; // key and query at the centre; z = log2(pixels per entry)
  compare: Pane[];
  difference: boolean;
  parameters: Record<string, Parameter>;
  story: { name: string; step: number } | null; // step 1 is the first
  as: "maps" | "profiles";
  sort: string;
  down: boolean;
  classes: string[]; // shown; none: all
  by: string; // the measure that is filtered
  min: number | null;
  max: number | null;
}

export const DEFAULT: State = {
  page: "home",
  subject: "0",
  layer: 1,
  head: 1,
  show: null,
  length: null,
  input: null,
  seed: 0,
  plane: "mean",
  sink: true,
  cursor: null,
  view: null,
  compare: [],
  difference: false,
  parameters: {},
  story: null,
  as: "maps",
  sort: "place",
  down: false,
  classes: [],
  by: "sink",
  min: null,
  max: null,
};

export const TEXT_IN_ADDRESS = 4000;
const SHOWS: readonly string[] = ["bias", "scores", "weights", "position", "flat"];
const ROUNDING = 1e4;

/** The state of an address; what cannot be read is left at its default. */
export function parse(hash: string): State {
  const [path = "", search = ""] = split(hash.replace(/^#/, ""));
  const query = new URLSearchParams(search);
  const parts = path.split("/").filter(Boolean).map(decode);
  const state: State = { ...DEFAULT };
  if (parts[0] === "subject" && parts[1]) {
    state.subject = parts[1];
    state.page = "overview";
    if (parts[2] === "head") {
      state.page = "head";
      state.layer = whole(parts[3], 1) ?? 1;
      state.head = whole(parts[4], 1) ?? 1;
    }
  } else if (parts[0] === "encoding" && parts[1]) {
    state.page = "encoding";
    state.subject = parts[1];
    state.head = whole(parts[2], 1) ?? 1;
  }
  const show = query.get("show");
  if (show && SHOWS.includes(show)) state.show = show as Show;
  state.length = whole(query.get("length"), 1);
  state.seed = whole(query.get("seed"), 0) ?? 0;
  const document = whole(query.get("doc"), 0);
  const text = query.get("text");
  if (text !== null) state.input = { kind: "text", text };
  else if (document !== null) state.input = { kind: "document", id: document };
  const written = /^(\d{1,6}):(\d{1,6})$/.exec(query.get("written") ?? "");
  if (written && state.input?.kind !== "written")
    state.input = { kind: "written", of: state.input ?? { kind: "none" }, length: Number(written[1]), tokens: Number(written[2]) };
  const plane = query.get("reduce");
  if (plane === "low" || plane === "high") state.plane = plane;
  state.sink = query.get("sink") !== "0";
  const [q, k] = [whole(query.get("q"), 0), whole(query.get("k"), 0)];
  if (q !== null && k !== null) state.cursor = { query: q, key: k };
  const [x, y, z] = ["x", "y", "z"].map((name) => real(query.get(name)));
  if (x !== null && y !== null && z !== null) state.view = { x: x!, y: y!, z: z! };
  state.compare = (query.get("compare") ?? "").split(",").flatMap(pane);
  state.difference = query.get("difference") === "1" && state.compare.length > 0;
  state.parameters = parameters(query);
  const story = /^([\w-]+):(\d{1,3})$/.exec(query.get("story") ?? "");
  if (story && Number(story[2]) > 0) state.story = { name: story[1]!, step: Number(story[2]) };
  if (query.get("as") === "profiles") state.as = "profiles";
  state.sort = query.get("sort") ?? "place";
  state.down = query.get("down") === "1";
  state.classes = (query.get("class") ?? "").split(",").filter(Boolean);
  state.by = query.get("by") ?? "sink";
  state.min = real(query.get("min"));
  state.max = real(query.get("max"));
  return state;
}

/** The address of a state; long texts are not in it. */
export function format(state: State): string {
  const query: [string, string][] = [];
  const add = (name: string, value: string | number | null | false) => {
    if (value !== null && value !== false && value !== "") query.push([name, String(value)]);
  };
  add("show", state.show);
  add("length", state.length);
  const read = state.input?.kind === "written" ? state.input.of : state.input;
  if (read?.kind === "document") add("doc", read.id);
  if (read?.kind === "text" && !isLong(read)) query.push(["text", read.text]);
  if (state.input?.kind === "written" && !isLong(read)) add("written", `${state.input.length}:${state.input.tokens}`);
  add("seed", state.seed || null);
  if (state.page === "overview") {
    add("as", state.as !== "maps" && state.as);
    add("sort", state.sort !== "place" && state.sort);
    add("down", state.down && "1");
    add("class", state.classes.join(","));
    if (state.min !== null || state.max !== null) add("by", state.by);
    add("min", state.min);
    add("max", state.max);
  } else {
    add("reduce", state.plane !== "mean" && state.plane);
    add("sink", !state.sink && "0");
    if (state.cursor) query.push(["q", String(state.cursor.query)], ["k", String(state.cursor.key)]);
    if (state.view) for (const name of ["x", "y", "z"] as const) add(name, Math.round(state.view[name] * ROUNDING) / ROUNDING);
    add("compare", state.compare.map((one) => `${one.subject}:${one.layer}:${one.head}`).join(","));
    add("difference", state.difference && "1");
  }
  for (const [name, value] of Object.entries(state.parameters)) query.push([`p.${name}`, Array.isArray(value) ? `[${value.join(",")}]` : String(value)]);
  if (state.story) query.push(["story", `${state.story.name}:${state.story.step}`]);
  const search = query.map(([name, value]) => `${encodeURIComponent(name)}=${encode(value)}`).join("&");
  return `#${path(state)}${search ? `?${search}` : ""}`;
}

export function isLong(input: Input | null): boolean {
  const read = input?.kind === "written" ? input.of : input;
  return read?.kind === "text" && read.text.length > TEXT_IN_ADDRESS;
}

function path(state: State): string {
  const subject = encodeURIComponent(state.subject);
  if (state.page === "overview") return `/subject/${subject}`;
  if (state.page === "head") return `/subject/${subject}/head/${state.layer}/${state.head}`;
  return state.page === "encoding" ? `/encoding/${subject}${state.head > 1 ? `/${state.head}` : ""}` : "/";
}

function split(hash: string): string[] {
  const at = hash.indexOf("?");
  return at < 0 ? [hash] : [hash.slice(0, at), hash.slice(at + 1)];
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Readable where it may be: commas, colons and brackets stay as they are. */
function encode(value: string): string {
  // A text may hold half of a surrogate pair, which encodeURIComponent refuses.
  return encodeURIComponent(value.toWellFormed()).replace(/%(2C|3A|5B|5D)/g, (code) => decodeURIComponent(code));
}

function whole(text: string | null | undefined, least: number): number | null {
  return text && /^\d{1,9}$/.test(text) && Number(text) >= least ? Number(text) : null;
}

function real(text: string | null | undefined): number | null {
  return text && Number.isFinite(Number(text)) ? Number(text) : null;
}

function pane(text: string): Pane[] {
  const [subject, layer, head] = text.split(":");
  const [l, h] = [whole(layer, 1), whole(head, 1)];
  return subject && l !== null && h !== null ? [{ subject, layer: l, head: h }] : [];
}

function parameters(query: URLSearchParams): Record<string, Parameter> {
  const values: Record<string, Parameter> = {};
  for (const [name, text] of query) {
    if (!name.startsWith("p.")) continue;
    const list = /^\[(.*)\]$/.exec(text);
    if (list) values[name.slice(2)] = list[1]!.split(",").map(Number).filter(Number.isFinite);
    else values[name.slice(2)] = text === "true" || text === "false" ? text === "true" : (real(text) ?? text);
  }
  return values;
}
