// Numbers and tokens as text.

import type { Show } from "../data/types";

export const SHOWS: Record<Show, { label: string; help: string }> = {
  bias: { label: "Bias", help: "what the encoding adds to the scores" },
  scores: { label: "Scores", help: "before the softmax: scaled q·k, rotated, with the bias" },
  weights: { label: "Weights", help: "after the softmax, on a logarithmic colour scale" },
  position: { label: "Positional part", help: "the part of the scores that comes from position alone" },
  flat: { label: "Position only", help: "what the head could see: weights if all content were equal" },
};

/** What the words of the page mean, for tooltips. */
export const MEANINGS: Record<string, string> = {
  class: "The shape of the head's attention by distance. Flat: about equal for all keys. Decaying: it falls with the distance. Sink: at least ¾ goes to the first token.",
  flat: "Attention that is about equal for all keys.",
  decaying: "Attention that falls with the distance.",
  periodic: "Attention in waves over the distance.",
  sink: "The share of all attention that goes to the first token.",
  "previous token": "At least half of the attention, without the sink, goes to the token before.",
  "next token": "At least half of the attention, without the sink, goes to the token after.",
  other: "None of the other shapes.",
  half_distance: "Within this distance lies half of the attention, without the sink.",
  decay: "How fast the fitted curve falls: the rate of an exponential, or the exponent of a power.",
  entropy: "How widely attention is spread, in nats: 0 is a single key, log(n) is n keys alike.",
  uniformity: "The share of the variance that the distance explains: 1 means that every diagonal has one value.",
  context_dependence: "How much the map differs on another text: 0 means not at all, 1 as much as two unrelated maps.",
  range: "The smallest and the largest value of the map.",
};

/** A number in four significant digits with a real minus sign; "–" where there is none. */
export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 2) : trimmed(value.toPrecision(digits), value);
  return text.replaceAll("-", "−").replace("e+", "e");
}

function trimmed(text: string, value: number): string {
  return Number.isInteger(value) ? String(value) : text.includes("e") ? String(Number(text)) : text;
}

/** A share as a percentage. */
export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const share = 100 * value;
  return `${share !== 0 && share < 10 ? share.toFixed(1) : share.toFixed(0)} %`;
}

/** A whole number with separators: 65,536. */
export function count(value: number): string {
  return value.toLocaleString("en-US");
}

/** A number of things: 1 head, 12 heads. */
export function several(number: number, thing: string): string {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

/** Shares such as uniformity: 1 and 0 are exact, 1.000 is rounded. */
export function share(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value === 1 || value === 0 ? String(value) : value.toFixed(3);
}

const SIGNS: Record<string, string> = { "\n": "⏎", "\r": "⏎", "\t": "⇥" };

/** A token for a narrow place: spaces and line ends are visible, control characters are not sent to the screen. */
export function tokenLabel(token: string): string {
  const label = token.replace(/[\n\r\t]/g, (sign) => SIGNS[sign] ?? sign).replace(/[\u0000-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g, "�");
  return label.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)) || "∅";
}
