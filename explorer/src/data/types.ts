// Made by `python -m relpos.explorer.replies`: see relpos/explorer/replies.py.

export const TILE = 256;
export const SIDE = 48;
export const MOST_SIDE = 192;
export const FLAT_RANGE = 0.05;
export const LONGEST = 65536;
export const TEXT_BYTES = 1000000;
export type Show = "bias" | "scores" | "weights" | "position" | "flat";
export type Kind = "encoding" | "model" | "tensor";
export type ColourMap = "sequential" | "diverging" | "weights";
export type Extend = "neither" | "min" | "max" | "both";
export type Parameter = number | string | boolean | number[];
export type Numbers = (number | null)[];
export type Reading = NoInput | DocumentInput | TextInput;
export type Input = NoInput | DocumentInput | TextInput | WrittenInput;

export interface Slider {
  name: string;
  label: string;
  help: string;
  kind: "float" | "int" | "choice" | "per_head";
  low: number | null;
  high: number | null;
  step: number | null;
  scale: "linear" | "log";
  value: Parameter;
  choices: (string | number | boolean)[] | null;
}

export interface Preset {
  name: string;
  parameters: Record<string, Parameter>;
}

export interface Formula {
  statements: string[];
  note: string;
  text: string;
}

export interface EncodingCard {
  name: string;
  summary: string;
  group: string;
  place: string;
  form: string;
  paper: string;
  arxiv: string | null;
  formula: Formula;
  parameters: Slider[];
  presets: Preset[];
  causal_only: boolean;
}

export interface StoryStep {
  text: string;
  address: string;
  reads?: number;
  unseen?: boolean;
  refused?: string;
  play?: string;
}

export interface Story {
  name: string;
  title: string;
  encoding: string;
  steps: StoryStep[];
}

export interface Group {
  title: string;
  names: string[];
}

export interface DocumentTitle {
  id: number;
  title: string;
  tokens: number;
}

export interface NoInput {
  kind: "none";
}

export interface DocumentInput {
  kind: "document";
  id: number;
}

export interface TextInput {
  kind: "text";
  text: string;
}

export interface WrittenInput {
  kind: "written";
  of: Reading;
  length: number;
  tokens: number;
}

export interface SceneRequest {
  subject: string | null;
  encoding?: string | null;
  length?: number;
  input?: Input;
  seed?: number;
  parameters?: Record<string, Parameter>;
  heads?: number;
  causal?: boolean;
}

export interface Subject {
  id: string;
  name: string;
  kind: Kind;
  encoding: string | null;
  family: string | null;
  layers: number;
  heads: number;
  causal: boolean;
  trained_length: number | null;
  shows: Show[];
  default_show: Show;
  reads_text: boolean;
  can_write: boolean;
  documents: DocumentTitle[];
  default: SceneRequest;
  evaluation: boolean;
  formula: Formula | null;
  paper: string | null;
  caption: string;
  parameters: Slider[];
}

export interface Start {
  version: string;
  subjects: Subject[];
  examples: Subject[];
  encodings: EncodingCard[];
  groups: Group[];
  stories: Story[];
  colour_maps: Record<ColourMap, string[]>;
  classes: string[];
}

export interface Scene {
  from?: number;
  scene: string;
  request: SceneRequest;
  length: number;
  layers: number;
  heads: number;
  causal: boolean;
  shows: Show[];
  default_show: Show;
  static: boolean;
  has_tokens: boolean;
  caption: string;
  notes: string[];
  uniformity: Numbers[] | null;
  context_dependence: Numbers[] | null;
}

export interface Scale {
  low: number;
  high: number;
  log: boolean;
  ticks: number[];
  extend: Extend;
}

export interface MassByDistance {
  distance: number[];
  mass: Numbers;
}

export interface HeadClass {
  class: string | null;
  half_distance: number | null;
  decay: number | null;
  sink: number | null;
}

export interface Colours {
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
}

export interface Thumbnail {
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
  map: string;
}

export interface HeadSummary {
  class: string | null;
  half_distance: number | null;
  decay: number | null;
  sink: number | null;
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
  map: string;
  head: number;
  entropy: number | null;
  uniformity: number | null;
  context_dependence: number | null;
  profile: MassByDistance | null;
}

export interface GalleryEntry {
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
  map: string;
  name: string;
  show: Show;
  length: number;
  head: number;
  distance: number[];
  heads: number[];
  profiles: Numbers[];
}

export interface LayerSummary {
  layer: number;
  heads: HeadSummary[];
  error?: string;
}

export interface Range {
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
  both_signs: boolean;
  low_without_sink: number;
  high_without_sink: number;
  scale_without_sink: Scale;
}

export interface Statistics {
  mean: Numbers;
  low: Numbers;
  high: Numbers;
}

export interface Profile {
  mean: Numbers;
  low: Numbers;
  high: Numbers;
  distance: number[];
}

export interface Mass {
  distance: number[];
  mass: Numbers;
  fitted: Numbers;
  fitted_distance: number[];
  sink: number;
}

export interface HeadDetail {
  low: number;
  high: number;
  log: boolean;
  colour_map: ColourMap;
  scale: Scale;
  both_signs: boolean;
  low_without_sink: number;
  high_without_sink: number;
  scale_without_sink: Scale;
  class: Record<string, unknown> | null;
  profile: Profile;
  mass: Mass | null;
  caption: string;
  alt: string;
}

export interface Row {
  mean: Numbers;
  low: Numbers;
  high: Numbers;
  query: number;
  first: number;
  step: number;
}

export interface Curve {
  label: string;
  protocol: string;
  lengths: number[];
  perplexity: Numbers;
  low: Numbers;
  high: Numbers;
}

export interface Evaluation {
  curves: Curve[];
  trained_length: number | null;
}

export interface StoredMap {
  level: number;
  low: number;
  high: number;
  log: boolean;
  cells: string;
}

export interface Progress {
  done: number | null;
}

export interface ExportData {
  start: Start;
  scenes: Scene[];
  overview: Record<string, LayerSummary[]>;
  heads: Record<string, HeadDetail>;
  maps: Record<string, StoredMap>;
  tokens: Record<string, string[]>;
  evaluations: Record<string, Evaluation>;
}
