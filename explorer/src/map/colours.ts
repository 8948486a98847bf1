// Colours and ticks of maps, by the rules of relpos/pictures/colours.py: the same picture as in the figures.

import { PLANES, TILE, type Plane } from "../data/source";
import type { Range } from "../data/types";

export const FLAT_RANGE = 0.05; // a head whose values span less looks flat
export const LEAST_WEIGHT = 1e-4; // all weights below it have the same colour

/** Where a value lies on the colour bar. */
export interface Norm {
  low: number;
  high: number;
  log: boolean;
}

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

/** The norm of a range; `withoutSink` leaves the first key's column out of it. */
export function normOf(range: Range, withoutSink: boolean): Norm {
  const low = (withoutSink ? range.low_without_sink : null) ?? range.low;
  const high = (withoutSink ? range.high_without_sink : null) ?? range.high;
  if (range.log) {
    const least = Math.max(low, LEAST_WEIGHT);
    return { low: least, high: Math.max(high, 2 * least), log: true };
  }
  if (range.colour_map === "diverging") {
    const most = Math.max(-low, high, FLAT_RANGE / 2);
    return { low: -most, high: most, log: false };
  }
  return { low: Math.min(low, high - FLAT_RANGE), high, log: false };
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

/** The ticks of a colour bar or an axis: round numbers within the norm, at most `most` of them. */
export function ticksOf(norm: Norm, most = 7): number[] {
  if (norm.log) {
    const ticks: number[] = [];
    for (let power = Math.ceil(Math.log10(norm.low) - 1e-9); 10 ** power <= norm.high * (1 + 1e-9); power++) ticks.push(10 ** power);
    return ticks.length ? ticks : [norm.high];
  }
  const span = norm.high - norm.low;
  if (!(span > 1e-4 * Math.max(Math.abs(norm.low), Math.abs(norm.high)))) return [norm.high];
  const raw = span / most;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = base * ([1, 2, 2.5, 5, 10].find((factor) => factor * base >= raw * (1 - 1e-9)) ?? 10);
  const ticks: number[] = [];
  for (let n = Math.ceil(norm.low / step - 1e-6); n * step <= norm.high + 1e-6 * span; n++) ticks.push(n * step + 0);
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
