import { describe, expect, it } from "vitest";
import { colourTile, paletteOf, place, ticksOf, tickWords } from "../src/map/colours";
import { TILE } from "../src/data/source";

const grey = paletteOf(Array.from({ length: 256 }, (_, n) => `#${n.toString(16).padStart(2, "0").repeat(3)}`));
const norm = { low: -2, high: 0, log: false };

describe("colours of a tile", () => {
  it("go from the first to the last of the palette, and nothing is drawn where no key is seen", () => {
    const tile = new Float32Array(3 * TILE * TILE).fill(NaN);
    tile.set([-2, -1, 0, 5, -9], TILE * TILE); // the mean's plane
    const pixels = colourTile(tile, "mean", norm, grey);
    expect([...pixels.subarray(0, 20)]).toEqual([0, 0, 0, 255, 128, 128, 128, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 255]);
    expect(pixels[20 + 3]).toBe(0);
    expect(colourTile(tile, "low", norm, grey).every((value) => value === 0)).toBe(true);
  });
  it("read red, green and blue in order", () => {
    const pixels = new Uint8Array(paletteOf(Array.from({ length: 256 }, () => "#123456")).buffer);
    expect([...pixels.subarray(0, 4)]).toEqual([0x12, 0x34, 0x56, 255]);
  });
});

describe("the norm", () => {
  it("is logarithmic for weights: equal factors are equal steps", () => {
    const norm = { low: 1e-4, high: 1, log: true };
    expect(place(norm, 1e-2)).toBeCloseTo(0.5);
    expect(place(norm, 0)).toBe(0);
  });
});

describe("ticks", () => {
  it("are round numbers within the range", () => {
    expect(tickWords(ticksOf(-7.3, 0.2))).toEqual(["−6", "−4", "−2", "0"]);
    expect(tickWords(ticksOf(0, 0.05))).toEqual(["0.00", "0.01", "0.02", "0.03", "0.04", "0.05"]);
    expect(tickWords([0.001, 0.01, 0.1, 1], true)).toEqual(["0.001", "0.01", "0.1", "1"]);
  });
});
