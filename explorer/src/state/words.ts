// Numbers and tokens as text.

import type { Show } from "../data/types";

export const SHOWS: Record<Show, { label: string; help: string }> = {
  bias: { label: "Bias", help: "what the encoding adds to the scores" },
  scores: { label: "Scores", help: "before the softmax: scaled q·k, rotated, with the bias" },
  weights: { label: "Weights", help: "after the softmax, on a logarithmic colour scale" },
  position: { label: "Positional part", help: "the part of the scores that comes from position alone" },
  flat: { label: "Over flat content", help: "softmax over equal content: what this head could see" },
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
