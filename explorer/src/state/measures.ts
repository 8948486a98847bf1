// What heads are sorted and filtered by.

import type { HeadSummary } from "../data/types";
import type { State } from "./address";
import { number, percent, share } from "./words";

export interface HeadAt extends HeadSummary {
  layer: number;
}

type Name = "half_distance" | "decay" | "sink" | "entropy" | "uniformity" | "context_dependence";

export const MEASURES: { name: Name; label: string; text: (value: number) => string }[] = [
  { name: "half_distance", label: "half-distance", text: (value) => number(value, 3) },
  { name: "decay", label: "decay", text: (value) => number(value, 3) },
  { name: "sink", label: "sink share", text: percent },
  { name: "entropy", label: "entropy", text: (value) => number(value, 3) },
  { name: "uniformity", label: "uniformity", text: share },
  { name: "context_dependence", label: "context dependence", text: share },
];

export function measured(head: HeadAt, name: string): number | null {
  return MEASURES.some((measure) => measure.name === name) ? (head[name as Name] ?? null) : null;
}

/** Whether a head is shown, by its class and by the limits of one measure. */
export function passes(head: HeadAt, state: Pick<State, "classes" | "by" | "min" | "max">): boolean {
  if (state.classes.length && !state.classes.includes(head.class ?? "")) return false;
  if (state.min === null && state.max === null) return true;
  const value = measured(head, state.by);
  return value !== null && value >= (state.min ?? -Infinity) && value <= (state.max ?? Infinity);
}

/** Heads in order; those without the measure are last in both directions. */
export function sorted(heads: HeadAt[], by: string, down: boolean): HeadAt[] {
  const sign = down ? -1 : 1;
  const place = (a: HeadAt, b: HeadAt) => a.layer - b.layer || a.head - b.head;
  if (by === "place") return [...heads].sort((a, b) => sign * place(a, b));
  if (by === "class") return [...heads].sort((a, b) => sign * (a.class ?? "").localeCompare(b.class ?? "") || place(a, b));
  return [...heads].sort((a, b) => {
    const [one, other] = [measured(a, by), measured(b, by)];
    if (one === null || other === null) return Number(one === null) - Number(other === null) || place(a, b);
    return sign * (one - other) || place(a, b);
  });
}
