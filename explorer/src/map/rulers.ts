// The rulers beside a map: positions of keys along the top and of queries at the left; tokens where there is room.

import { tokenLabel } from "../state/words";
import { ticksOf } from "./colours";
import type { Frame } from "./matrix-map";

export const LEFT = 58;
export const TOP = 20;
export const TOP_OF_TOKENS = 58; // where keys have tokens, which are written upwards
export const ROOM = 13; // pixels of an entry from which on its token fits beside it

export interface RulerColours {
  text: string;
  faint: string;
  mark: string;
}

type TokenAt = (position: number) => string | undefined;

/** Draw the ruler of keys (along the top) or of queries (at the left). */
export function drawRuler(
  canvas: HTMLCanvasElement,
  axis: "keys" | "queries",
  frame: Frame,
  length: number,
  colours: RulerColours,
  mark: number | null,
  tokenAt: TokenAt | null,
  tall: boolean, // whether keys have room for tokens
): void {
  const along = axis === "keys";
  const top = tall ? TOP_OF_TOKENS : TOP;
  const [width, height] = along ? [frame.width, top] : [LEFT, frame.height];
  const context = sized(canvas, width, height);
  context.font = '11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif';
  context.textBaseline = "middle";
  const start = along ? frame.left : frame.top;
  const span = (along ? frame.width : frame.height) * frame.resolution;
  const pixel = (position: number) => (position + 0.5 - start) / frame.resolution;
  const room = 1 / frame.resolution;
  const tokens = tokenAt && (along ? tall : room >= ROOM) ? tokenAt : null;
  const write = (position: number, text: string, colour: string) => {
    const at = pixel(position);
    const most = along ? frame.width : frame.height;
    if (tokens && (at < 5 || at > most - 5)) return; // cut off: it would be written over its neighbour
    context.fillStyle = colour;
    context.textAlign = along && !tokens ? "center" : "right";
    const short = fitting(context, text, along ? (tokens ? top - 10 : 44) : LEFT - 10);
    const half = context.measureText(short).width / 2;
    if (!along) context.fillText(short, LEFT - 6, Math.min(Math.max(at, 6), frame.height - 6));
    else if (!tokens) context.fillText(short, Math.min(Math.max(at, half), frame.width - half), top - TOP / 2);
    else {
      context.save();
      context.translate(at, top - 4);
      context.rotate(Math.PI / 2); // read from top to bottom, ending at the map
      context.fillText(short, 0, 0);
      context.restore();
    }
  };
  const first = Math.max(0, Math.floor(start));
  const last = Math.min(length - 1, Math.ceil(start + span));
  const far = (position: number) => mark === null || Math.abs(pixel(position) - pixel(mark)) > (along ? 36 : 13);
  if (tokens) {
    for (let n = first; n <= last; n++) if (n !== mark) write(n, tokenLabel(tokens(n) ?? ""), colours.text);
  } else {
    const most = Math.max(2, Math.floor((along ? frame.width : frame.height) / 70));
    for (const tick of ticksOf(first, Math.max(last, first + 1), most)) {
      if (!Number.isInteger(tick) || tick > last) continue;
      context.fillStyle = colours.faint;
      const at = Math.round(pixel(tick));
      if (along) context.fillRect(at, top - 4, 1, 4);
      else context.fillRect(LEFT - 4, at, 4, 1);
      if (far(tick)) write(tick, String(tick), colours.text);
    }
  }
  if (mark !== null && mark >= first && mark <= last) write(mark, tokens ? tokenLabel(tokens(mark) ?? "") : String(mark), colours.mark);
}

function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function fitting(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  let short = text;
  while (short.length > 1 && context.measureText(`${short}…`).width > room) short = short.slice(0, -1);
  return `${short}…`;
}
