// Files of what is shown: made by relpos where a server runs, by the page itself in an exported file.

import type { Explorer } from "../data/context";
import { Refusal } from "../data/source";
import type { MatrixMap } from "../map/matrix-map";
import { cellAt } from "../map/tile-cache";
import type { PaneModel } from "../state/pane.svelte";

export type Kind = "png" | "svg" | "csv";
const MOST_ENTRIES = 1_000_000; // of a CSV made by the page

interface Part {
  first_query: number;
  last_query: number;
  first_key: number;
  last_key: number;
}

/** The entries that are in sight. */
function inSight(map: MatrixMap, length: number): Part {
  const frame = map.frame();
  const within = (value: number) => Math.min(Math.max(Math.floor(value), 0), length - 1);
  if (!frame) return { first_query: 0, last_query: length - 1, first_key: 0, last_key: length - 1 };
  return {
    first_query: within(frame.top),
    last_query: within(frame.top + frame.height * frame.resolution),
    first_key: within(frame.left),
    last_key: within(frame.left + frame.width * frame.resolution),
  };
}

export async function save(explorer: Explorer, model: PaneModel, map: MatrixMap, kind: Kind, sink: boolean, title: string): Promise<void> {
  const { place, scene } = model;
  if (!place || !scene) throw new Refusal("Nothing is shown yet: wait for the map.");
  const part = inSight(map, scene.length);
  const options = Object.fromEntries(Object.entries(part).map(([name, value]) => [name, String(value)]));
  const file = await explorer.source.file(place, kind, sink ? options : { ...options, without_sink: "1" });
  const name = `${title}-${place.show}-layer${place.layer}-head${place.head}.${kind}`.replace(/[^\w.-]+/g, "-");
  download(file ?? (await made(model, map, kind, part, title)), name);
}

async function made(model: PaneModel, map: MatrixMap, kind: Kind, part: Part, title: string): Promise<Blob> {
  if (kind === "csv") return new Blob([table(model, part)], { type: "text/csv" });
  const canvas = map.canvas();
  if (!canvas) throw new Refusal("Nothing is drawn yet: wait for the map.");
  if (kind === "png") return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Refusal("The browser made no picture.")))));
  const { width, height } = canvas;
  const words = `${title}: ${model.place!.show}, layer ${model.place!.layer}, head ${model.place!.head}; queries ${part.first_query} to ${part.last_query}, keys ${part.first_key} to ${part.last_key}`;
  const svg = document.implementation.createDocument("http://www.w3.org/2000/svg", "svg");
  const add = (tag: string, attributes: Record<string, string>, text = "") => {
    const node = svg.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    svg.documentElement.append(node);
  };
  svg.documentElement.setAttribute("viewBox", `0 0 ${width} ${height + 28}`);
  add("title", {}, words);
  add("text", { x: "0", y: "18", "font-family": "sans-serif", "font-size": "14" }, words);
  add("image", { y: "28", width: String(width), height: String(height), href: canvas.toDataURL("image/png") });
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}

function table(model: PaneModel, part: Part): string {
  const entries = (part.last_query - part.first_query + 1) * (part.last_key - part.first_key + 1);
  if (entries > MOST_ENTRIES) throw new Refusal(`${entries} entries are in sight, more than ${MOST_ENTRIES}: zoom in.`);
  const lines = ["query,key,value"];
  for (let query = part.first_query; query <= part.last_query; query++) {
    for (let key = part.first_key; key <= part.last_key; key++) {
      const cell = cellAt(model.layer!, 0, query, key);
      if (cell && !Number.isNaN(cell.mean)) lines.push(`${query},${key},${cell.mean}`);
    }
  }
  if (lines.length === 1) throw new Refusal("Single entries are not loaded at this zoom: zoom in.");
  return `${lines.join("\n")}\n`;
}

export function download(file: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
