import { describe, expect, it } from "vitest";
import { passes, sorted, type HeadAt } from "../src/state/measures";

const head = (layer: number, number: number, sink: number | null, kind: string) => ({ layer, head: number, sink, class: kind }) as HeadAt;
const heads = [head(1, 1, 0.5, "flat"), head(1, 2, null, "other"), head(2, 1, 0.1, "sink"), head(2, 2, 0.5, "flat")];
const names = (some: HeadAt[]) => some.map((one) => `${one.layer}.${one.head}`);

describe("all heads at once", () => {
  it("are sorted by a measure; those without it are last in both directions", () => {
    expect(names(sorted(heads, "sink", false))).toEqual(["2.1", "1.1", "2.2", "1.2"]);
    expect(names(sorted(heads, "sink", true))).toEqual(["1.1", "2.2", "2.1", "1.2"]);
  });
  it("are filtered by class and by the limits of a measure", () => {
    const none = { classes: [], by: "sink", min: null, max: null };
    expect(heads.every((one) => passes(one, none))).toBe(true);
    expect(names(heads.filter((one) => passes(one, { ...none, classes: ["flat"] })))).toEqual(["1.1", "2.2"]);
    expect(names(heads.filter((one) => passes(one, { ...none, max: 0.2 })))).toEqual(["2.1"]);
  });
});
