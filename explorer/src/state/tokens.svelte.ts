// The tokens of a scene, loaded in pieces around where they are needed.

import type { Source } from "../data/source";

const PIECE = 2000;

export class Tokens {
  version = $state(0); // grows as tokens arrive
  private readonly pieces = new Map<number, string[] | null>(); // null: on the way

  constructor(
    private readonly source: Source,
    readonly scene: string,
    readonly total: number,
  ) {}

  /** A token, if it is loaded; otherwise it will be. */
  readonly at = (position: number): string | undefined => {
    const piece = Math.floor(position / PIECE);
    const tokens = this.pieces.get(piece);
    if (tokens === undefined) this.load(piece);
    return tokens?.[position - piece * PIECE];
  };

  private load(piece: number): void {
    if (piece < 0 || piece * PIECE >= this.total) return;
    this.pieces.set(piece, null);
    this.source
      .tokens(this.scene, piece * PIECE, Math.min(PIECE, this.total - piece * PIECE))
      .then((tokens) => {
        this.pieces.set(piece, tokens);
        this.version++;
      })
      .catch(() => this.pieces.delete(piece));
  }
}
