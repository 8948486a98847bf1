// From the state of the page to the scene that the server should make.

import type { Explorer } from "../data/context";
import type { Input, SceneRequest } from "../data/types";
import type { State } from "./address";

/** The request for a subject (by id) or an encoding (by name), on the input of the page. */
export function requestOf(explorer: Explorer, id: string, state: State): SceneRequest {
  const subject = explorer.subject(id);
  const own = subject?.default ?? {
    subject: null,
    encoding: id,
    length: 512,
    input: { kind: "none" } as Input,
    seed: 0,
    parameters: {},
    heads: explorer.subject(state.subject)?.heads, // as many as the head it is compared with
  };
  // Parameters belong to the page's first subject; a subject that is compared keeps its own.
  const parameters = id === state.subject ? { ...own.parameters, ...state.parameters } : own.parameters;
  return { ...own, length: state.length ?? own.length, input: inputOf(explorer, id, state) ?? own.input, seed: state.seed || own.seed || 0, parameters };
}

function inputOf(explorer: Explorer, id: string, state: State): Input | null {
  const subject = explorer.subject(id);
  if (!subject?.reads_text || !state.input) return null;
  const { input } = state;
  const read = input.kind === "written" ? input.of : input;
  if (read.kind === "document" && !subject.documents.some((one) => one.id === read.id)) return null;
  return input;
}
