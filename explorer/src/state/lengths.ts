// The length in the address is that of what is shown.

import type { Scene } from "../data/types";
import { address } from "./store.svelte";

/** A length that was asked for, and the shorter one that the input has. */
export interface Shortfall {
  asked: number;
  length: number;
}

/** Put the length of a scene into the address, where more tokens were asked for than its input has. */
export function agreed(scene: Scene, before: Shortfall | null): Shortfall | null {
  const asked = address.state.length;
  if (asked !== null && asked > scene.length) {
    address.adjust({ length: scene.length });
    return { asked, length: scene.length };
  }
  return before?.length === scene.length ? before : null;
}
