// The slider that moves by itself: at most one.

class Player {
  name = $state<string | null>(null); // of its parameter

  start(name: string): void {
    this.name = name;
  }

  stop(): void {
    this.name = null;
  }

  toggle(name: string): void {
    this.name = this.name === name ? null : name;
  }
}

export const player = new Player();
