import { describe, expect, it } from "vitest";
import { colourTile, normOf, paletteOf, place, ticksOf, tickWords } from "../src/map/colours";
import { TILE } from "../src/data/source";

const grey = paletteOf(Array.from({ length: 256 }, (_, n) => `#${n.toString(16).padStart(2, "0").repeat(3)}`));
const range = { low: -2, high: 0, colour_map: "sequential" as const, log: false };

describe("colours of a tile", () => {
  it("go from the first to the last of the palette, and nothing is drawn where no key is seen", () => {
    const tile = new Float32Array(3 * TILE * TILE).fill(NaN);
    tile.set([-2, -1, 0, 5, -9], TILE * TILE); // the mean's plane
    const pixels = colourTile(tile, "mean", normOf(range, false), grey);
    expect([...pixels.subarray(0, 20)]).toEqual([0, 0, 0, 255, 128, 128, 128, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 255]);
    expect(pixels[20 + 3]).toBe(0);
    expect(colourTile(tile, "low", normOf(range, false), grey).every((value) => value === 0)).toBe(true);
  });
  it("read red, green and blue in order", () => {
    const pixels = new Uint8Array(paletteOf(Array.from({ length: 256 }, () => "#123456")).buffer);
    expect([...pixels.subarray(0, 4)]).toEqual([0x12, 0x34, 0x56, 255]);
  });
});

describe("the norm", () => {
  it("is centred on 0 where both signs matter", () => {
    expect(normOf({ low: -1, high: 3, colour_map: "diverging", log: false }, false)).toEqual({ low: -3, high: 3, log: false });
  });
  it("spans at least 0.05, so that a constant head looks constant", () => {
    expect(normOf({ low: 1, high: 1, colour_map: "sequential", log: false }, false)).toEqual({ low: 0.95, high: 1, log: false });
  });
  it("can leave out the first key", () => {
    const sink = { low: 1e-9, high: 1, low_without_sink: 1e-9, high_without_sink: 0.1, colour_map: "weights" as const, log: true };
    expect(normOf(sink, false).high).toBe(1);
    expect(normOf(sink, true)).toEqual({ low: 1e-4, high: 0.1, log: true });
  });
  it("is logarithmic for weights: equal factors are equal steps", () => {
    const norm = { low: 1e-4, high: 1, log: true };
    expect(place(norm, 1e-2)).toBeCloseTo(0.5);
    expect(place(norm, 0)).toBe(0);
  });
});

describe("ticks", () => {
  it("are round numbers within the range", () => {
    expect(tickWords(ticksOf({ low: -7.3, high: 0.2, log: false }))).toEqual(["−6", "−4", "−2", "0"]);
    expect(tickWords(ticksOf({ low: 0, high: 0.05, log: false }))).toEqual(["0.00", "0.01", "0.02", "0.03", "0.04", "0.05"]);
    expect(tickWords(ticksOf({ low: 2e-4, high: 1, log: true }), true)).toEqual(["0.001", "0.01", "0.1", "1"]);
  });
});
