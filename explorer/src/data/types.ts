// What the server sends: see docs/explorer.md. Layers and heads are counted from 1, queries and keys from 0.

export type Show = "bias" | "scores" | "weights" | "position" | "flat";
export type ColourMap = "sequential" | "diverging" | "weights";
export type Parameter = number | string | boolean | number[];

export interface Slider {
  name: string;
  label: string;
  help: string;
  kind: "float" | "int" | "choice" | "per_head";
  low?: number | null;
  high?: number | null;
  step?: number | null;
  scale?: "linear" | "log";
  value: Parameter;
  choices?: (string | number | boolean)[] | null;
}

export interface EncodingCard {
  name: string;
  summary: string;
  place: string;
  form: string;
  paper: string;
  arxiv: string | null;
  formula: string;
  parameters: Slider[];
  causal_only: boolean;
}

export interface DocumentTitle {
  id: number;
  title: string;
  tokens: number;
}

export type Reading = { kind: "none" } | { kind: "document"; id: number } | { kind: "text"; text: string };
/** What a model reads; "written": the first `length` tokens of something, and those that it wrote after them. */
export type Input = Reading | { kind: "written"; of: Reading; length: number; tokens: number };

export interface SceneRequest {
  subject: string | null;
  encoding?: string | null;
  length?: number | null;
  input?: Input;
  seed?: number;
  parameters?: Record<string, Parameter>;
  heads?: number | null;
  causal?: boolean | null;
}

export interface Subject {
  id: string;
  name: string;
  kind: "encoding" | "model" | "tensor";
  encoding: string | null;
  family: string | null;
  layers: number;
  heads: number;
  head_dim: number;
  causal: boolean;
  trained_length: number | null;
  shows: Show[];
  default_show: Show;
  reads_text: boolean;
  can_write: boolean;
  documents: DocumentTitle[];
  default: SceneRequest;
  evaluation: boolean;
  formula: string | null;
  paper: string | null;
  caption: string | null;
  parameters: Slider[];
}

export interface Start {
  version: string;
  subjects: Subject[];
  encodings: EncodingCard[];
  colour_maps: Record<ColourMap, string[]>;
  classes: string[];
  limits: { text_bytes: number; length: number; tile: number };
}

export interface Scene {
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
  uniformity: (number | null)[][] | null;
  context_dependence: (number | null)[][] | null;
  from?: number;
}

export interface MassByDistance {
  distance: number[];
  mass: (number | null)[];
}

export interface HeadSummary {
  head: number;
  class: string | null;
  half_distance: number | null;
  decay: number | null;
  sink: number | null;
  entropy: number | null;
  uniformity: number | null;
  context_dependence: number | null;
  low: number;
  high: number;
  colour_map: ColourMap;
  log?: boolean;
  map: string;
  profile: MassByDistance | null;
}

export interface LayerSummary {
  layer: number;
  heads: HeadSummary[];
  error?: string; // why a layer has no such values
}

export interface Range {
  low: number;
  high: number;
  low_without_sink?: number | null;
  high_without_sink?: number | null;
  colour_map: ColourMap;
  log: boolean;
}

export interface HeadDetail extends Range {
  class: Record<string, unknown> | null;
  profile: { distance: number[]; mean: (number | null)[]; low: (number | null)[]; high: (number | null)[] } | null;
  mass: (MassByDistance & { fitted?: (number | null)[] | null; fitted_distance?: number[] | null; sink?: number | null }) | null;
  caption: string;
  alt: string;
}

export interface Row {
  query: number;
  first: number;
  step: number;
  mean: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
}

export interface Evaluation {
  curves: {
    label: string;
    protocol: string;
    lengths: number[];
    perplexity: (number | null)[];
    low: (number | null)[] | null;
    high: (number | null)[] | null;
  }[];
  trained_length: number | null;
}
