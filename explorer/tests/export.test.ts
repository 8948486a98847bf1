import { describe, expect, it } from "vitest";
import { ExportSource } from "../src/data/export";
import type { ExportData } from "../src/data/types";
import { TILE } from "../src/data/source";

// A causal map of 300 tokens whose value is −distance: low −299, high 0; each code is a step of 299/254.
const length = 300;
const codes = new Uint8Array(length * length);
for (let i = 0; i < length; i++) for (let j = 0; j <= i; j++) codes[i * length + j] = 1 + Math.round(254 * (1 - (i - j) / 299));
const packed = new Response(new Blob([codes]).stream().pipeThrough(new CompressionStream("deflate")));
const cells = btoa(String.fromCharCode(...new Uint8Array(await packed.arrayBuffer())));
const place = { scene: "s", show: "bias" as const, layer: 1, head: 1 };
const source = new ExportSource({
  scenes: [{ scene: "s", length, request: { subject: "0" } }],
  maps: { "s/bias/1/1": { level: 0, low: -299, high: 0, log: false, cells } },
  heads: {},
  tokens: { s: ["a", "b", "c"] },
} as unknown as ExportData);
const step = 299 / 254;

describe("an exported file", () => {
  it("has the value of every entry, as well as 8 bits can say it", async () => {
    expect(Math.abs((await source.value(place, 200, 50))! + 150)).toBeLessThanOrEqual(step / 2);
    expect(await source.value(place, 50, 200)).toBeNull();
    const row = await source.row(place, 3);
    expect(row.mean.length).toBe(4);
    expect(row.mean[3]).toBe(0);
  });
  it("makes coarser levels with minimum, mean and maximum", async () => {
    const fine = await source.tile(place, { level: 0, row: 0, column: 0 });
    const coarse = await source.tile(place, { level: 1, row: 0, column: 0 });
    const entries = [0, 1].flatMap((r) => [0, 1].map((c) => fine[TILE * TILE + (200 + r) * TILE + 40 + c]!));
    const at = (plane: number) => coarse[plane * TILE * TILE + 100 * TILE + 20]!;
    expect(at(0)).toBeCloseTo(Math.min(...entries));
    expect(at(1)).toBeCloseTo(entries.reduce((a, b) => a + b) / 4, 3);
    expect(at(2)).toBeCloseTo(Math.max(...entries));
    const diagonal = [0, 1, 1].map((r, n) => fine[TILE * TILE + (10 + r) * TILE + 10 + (n === 2 ? 1 : 0)]!);
    expect(coarse[TILE * TILE + 5 * TILE + 5]).toBeCloseTo(diagonal.reduce((a, b) => a + b) / 3, 3);
    expect(coarse[TILE * TILE + 5 * TILE + 6]).toBeNaN();
    expect(coarse[TILE * TILE + 150 * TILE]).toBeNaN(); // beyond the end
  });
  it("refuses what it does not hold, in a sentence", async () => {
    await expect(source.tile({ ...place, head: 2 }, { level: 0, row: 0, column: 0 })).rejects.toThrow("This file does not hold that.");
    await expect(source.scene({ subject: null, encoding: "alibi" })).rejects.toThrow("Run relpos explore");
  });
});
