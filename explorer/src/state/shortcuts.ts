// Keys that work anywhere on a page, outside of text fields.

import type { Explorer } from "../data/context";
import { address } from "./store.svelte";

/** Do what a key stands for; false if it stands for nothing here. */
export function shortcut(explorer: Explorer, key: string): boolean {
  const { state } = address;
  const subject = explorer.subject(state.subject);
  if (key === "e") {
    address.open("#/");
    return true;
  }
  if (key === "o" && subject && state.page === "head") {
    address.go({ page: "overview", compare: [], difference: false, cursor: null, view: null });
    return true;
  }
  if (state.page !== "head" || !subject) return false;
  const clamp = (value: number, most: number) => Math.min(Math.max(value, 1), most);
  if (key === "[" || key === "]") address.go({ head: clamp(state.head + (key === "]" ? 1 : -1), subject.heads) });
  else if (key === "{" || key === "}") address.go({ layer: clamp(state.layer + (key === "}" ? 1 : -1), subject.layers) });
  else if (key === "s") address.go({ sink: !state.sink });
  else if (key === "d" && state.compare.length) address.go({ difference: !state.difference });
  else if (/^[1-5]$/.test(key) && subject.shows[Number(key) - 1]) address.go({ show: subject.shows[Number(key) - 1]! });
  else return false;
  return true;
}
