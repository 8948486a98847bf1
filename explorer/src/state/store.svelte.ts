// The state of the page, kept in its address: back and forward move through it.

import { format, isLong, parse, type State } from "./address";

const SETTLE = 250; // ms after the last movement of a map before the address follows it

class Address {
  state = $state.raw<State>(this.read());
  visits = $state(0); // grows when another address is opened: maps then take their place from it
  private settling: ReturnType<typeof setTimeout> | undefined;

  constructor() {
    addEventListener("popstate", () => this.visit(this.read()));
    addEventListener("hashchange", () => {
      if (location.hash !== format(this.state)) this.visit(this.read());
    });
  }

  /** Go somewhere: a new entry in the history. */
  go(change: Partial<State>): void {
    clearTimeout(this.settling);
    this.state = { ...this.state, ...change };
    this.write("pushState");
  }

  /** Go to an address of this page, such as a link's. */
  open(hash: string): void {
    this.visit(parse(hash));
    this.write("pushState");
  }

  private visit(state: State): void {
    clearTimeout(this.settling);
    this.state = state;
    this.visits++;
  }

  /** Change what is shown without a new entry in the history, such as the place in a map. */
  adjust(change: Partial<State>): void {
    this.state = { ...this.state, ...change };
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.write("replaceState"), SETTLE);
  }

  /** The address of a change, for links. */
  link(change: Partial<State>): string {
    return format({ ...this.state, ...change });
  }

  private write(how: "pushState" | "replaceState"): void {
    try {
      // A text too long for the address is kept in the history entry, so that back and forward still find it.
      history[how]({ input: isLong(this.state.input) ? this.state.input : null }, "", format(this.state));
    } catch {
      // A frame without an address of its own (a notebook's): the state lives in memory.
    }
  }

  private read(): State {
    const state = parse(location.hash);
    const kept = (history.state as { input?: State["input"] } | null)?.input;
    return kept ? { ...state, input: kept } : state;
  }
}

export const address = new Address();
