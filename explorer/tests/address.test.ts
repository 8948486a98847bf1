import { describe, expect, it } from "vitest";
import { DEFAULT, format, parse, type State } from "../src/state/address";

const state: State = {
  ...DEFAULT,
  page: "head",
  subject: "1",
  layer: 3,
  head: 5,
  show: "weights",
  length: 4096,
  input: { kind: "document", id: 3 },
  plane: "high",
  sink: false,
  cursor: { query: 17, key: 4 },
  view: { x: 12.5, y: 100.25, z: -2.5 },
  compare: [
    { subject: "0", layer: 2, head: 1 },
    { subject: "kerple_log", layer: 1, head: 8 },
  ],
  difference: true,
};

describe("the address of the page", () => {
  it("says in words what is shown", () => {
    expect(format(state)).toBe(
      "#/subject/1/head/3/5?show=weights&length=4096&doc=3&reduce=high&sink=0&q=17&k=4&x=12.5&y=100.25&z=-2.5" +
        "&compare=0:2:1,kerple_log:1:8&difference=1",
    );
  });
  it("holds the whole state", () => {
    expect(parse(format(state))).toEqual(state);
    const overview: State = { ...DEFAULT, page: "overview", as: "profiles", sort: "sink", down: true, classes: ["flat", "previous token"], by: "entropy", min: 0.5, max: 2 };
    expect(parse(format(overview))).toEqual(overview);
    const sliders: State = { ...DEFAULT, page: "encoding", subject: "kerple_log", head: 2, parameters: { r1: [1, 0.5], c: 0.1, scaling: "yarn", symmetric: false, scaled: true } };
    expect(parse(format(sliders))).toEqual(sliders);
  });
  it.each(["<script>alert(1)</script>", "a & b = c ? # / %", "\u0000\u202e odd \ud83d\ude00", "p.r1=5&x=1"])("keeps any text: %j", (text) => {
    const written = { ...DEFAULT, page: "head" as const, input: { kind: "text" as const, text } };
    expect(parse(format(written)).input).toEqual(written.input);
  });
  it("says what the model wrote after which tokens", () => {
    const input = { kind: "written" as const, of: { kind: "document" as const, id: 2 }, length: 512, tokens: 32 };
    const written = { ...DEFAULT, page: "head" as const, input };
    expect(format(written)).toBe("#/subject/0/head/1/1?doc=2&written=512:32");
    expect(parse(format(written)).input).toEqual(input);
  });
  it("leaves out texts of more than 4,000 characters", () => {
    const long = { ...DEFAULT, page: "head" as const, input: { kind: "text" as const, text: "a".repeat(4001) } };
    expect(format(long)).toBe("#/subject/0/head/1/1");
  });
  it.each(["", "#", "#/nowhere", "#/subject", "#/subject/0/head/x/-1?length=1e9&show=all&x=NaN&compare=::", "#/subject/%E0?%"])(
    "does not stumble over %j",
    (hash) => {
      expect(parse(hash)).toMatchObject({ length: null, show: null, view: null, compare: [] });
    },
  );
});
