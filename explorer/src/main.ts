import "uplot/dist/uPlot.min.css";
import "./app.css";
import { mount } from "svelte";
import App from "./App.svelte";
import { Explorer } from "./data/context";
import { ExportSource } from "./data/export";
import type { ExportData } from "./data/types";
import { ServerSource } from "./data/server";
import { sentence, type Source } from "./data/source";
import type { Start } from "./data/types";
import { address } from "./state/store.svelte";

function source(): Source {
  const inlined = document.getElementById("relpos-data");
  if (inlined) return new ExportSource(JSON.parse(inlined.textContent ?? "") as ExportData);
  const base = location.pathname.replace(/[^/]*$/, "");
  return new ServerSource(base, new URLSearchParams(location.search).get("token"));
}

/** Where a page without an address of its own begins: at the heads of a model, at an encoding, at a comparison. */
function begin(start: Start, live: boolean): void {
  if (location.hash.length > 1) return;
  const [first, ...others] = start.subjects;
  if (!first) return;
  const pane = (subject: string, layers: number) => ({ subject, layer: layers, head: 1 });
  if (others.length) {
    address.adjust({ page: "head", subject: first.id, layer: first.layers, head: 1, compare: others.slice(0, 3).map((one) => pane(one.id, one.layers)) });
  } else if (first.kind === "encoding" && live && first.encoding) address.adjust({ page: "encoding", subject: first.encoding });
  else address.adjust({ page: "overview", subject: first.id });
}

async function run(): Promise<void> {
  const target = document.getElementById("app")!;
  try {
    const data = source();
    const start = await data.start();
    begin(start, data.live);
    mount(App, { target, props: { explorer: new Explorer(data, start) } });
  } catch (error) {
    const words = document.createElement("p");
    words.className = "error";
    words.setAttribute("role", "alert");
    words.textContent = sentence(error);
    target.replaceChildren(words);
  }
}

void run();
