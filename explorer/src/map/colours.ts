// Colours and ticks of maps. Their scale comes from the server (relpos/maps/map.py): the same picture as in the figures.

import { PLANES, TILE, type Plane } from "../data/source";
import type { Scale } from "../data/types";

/** Where a value lies on the colour bar. */
export type Norm = Omit<Scale, "ticks" | "extend">;

/** 256 colours as 32-bit pixels in the byte order of ImageData. */
export type Palette = Uint32Array;

export function paletteOf(colours: string[]): Palette {
  const pixels = new Uint32Array(256);
  const bytes = new DataView(pixels.buffer);
  colours.forEach((colour, n) => {
    const rgb = Number.parseInt(colour.slice(1), 16);
    bytes.setUint32(4 * n, ((rgb << 8) | 0xff) >>> 0); // big-endian: R, G, B, A
  });
  return pixels;
}

/** From 0 (low) to 1 (high), clipped; NaN stays NaN. */
export function place(norm: Norm, value: number): number {
  const share = norm.log
    ? Math.log(Math.max(value, norm.low) / norm.low) / Math.log(norm.high / norm.low)
    : (value - norm.low) / (norm.high - norm.low);
  return share < 0 ? 0 : share > 1 ? 1 : share;
}

/** The pixels of one plane of a tile: transparent where no key is seen. */
export function colourTile(values: Float32Array, plane: Plane, norm: Norm, palette: Palette): Uint8ClampedArray<ArrayBuffer> {
  const pixels = new Uint32Array(TILE * TILE);
  const offset = PLANES[plane] * TILE * TILE;
  for (let n = 0; n < pixels.length; n++) {
    const value = values[offset + n]!;
    if (value === value) pixels[n] = palette[Math.min(255, Math.floor(place(norm, value) * 256))]!;
  }
  return new Uint8ClampedArray(pixels.buffer);
}

/** The ticks of an axis: round numbers from `low` to `high`, at most `most` of them. */
export function ticksOf(low: number, high: number, most = 7): number[] {
  const span = high - low;
  if (!(span > 1e-4 * Math.max(Math.abs(low), Math.abs(high)))) return [high];
  const raw = span / most;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = base * ([1, 2, 2.5, 5, 10].find((factor) => factor * base >= raw * (1 - 1e-9)) ?? 10);
  const ticks: number[] = [];
  for (let n = Math.ceil(low / step - 1e-6); n * step <= high + 1e-6 * span; n++) ticks.push(n * step + 0);
  return ticks;
}

/** Labels of ticks: as many decimals as they need, and a real minus sign. */
export function tickWords(ticks: number[], log = false): string[] {
  const near = ticks.length > 1 ? 1e-3 * Math.abs(ticks[1]! - ticks[0]!) : 0;
  const places = [0, 1, 2, 3, 4, 5].find((n) => ticks.every((tick) => Math.abs(Number(tick.toFixed(n)) - tick) < near));
  return ticks.map((tick) => {
    if (ticks.length > 1 && places !== undefined && !log) return tick.toFixed(places).replace("-", "−");
    const exponent = tick && Math.abs(tick) < 1e-4 ? Math.floor(Math.log10(Math.abs(tick)) + 1e-9) : 0;
    if (exponent) return `${tick < 0 ? "−" : ""}${Number((Math.abs(tick) / 10 ** exponent).toPrecision(3))}e−${-exponent}`;
    return String(Number(tick.toPrecision(4))).replace("-", "−");
  });
}
