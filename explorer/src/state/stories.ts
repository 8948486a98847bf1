// Where the steps of stories lead.

import type { Story } from "../data/types";

/** The address of a step, which is part of a story; 1 is the first. */
export function stepAddress(story: Story, step: number): string {
  const { address } = story.steps[step - 1]!;
  return `${address}${address.includes("?") ? "&" : "?"}story=${story.name}:${step}`;
}
