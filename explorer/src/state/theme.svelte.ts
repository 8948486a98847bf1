// Light or dark: the system's choice, unless the reader switches.

type Choice = "light" | "dark" | null;
const KEY = "relpos-theme";

class Theme {
  private choice = $state<Choice>(stored());
  private system = $state(matchMedia("(prefers-color-scheme: dark)").matches);

  constructor() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => (this.system = event.matches));
    this.apply();
  }

  get dark(): boolean {
    return this.choice === null ? this.system : this.choice === "dark";
  }

  toggle(): void {
    this.choice = this.dark ? "light" : "dark";
    this.apply();
    try {
      localStorage.setItem(KEY, this.choice);
    } catch {
      // a file or frame without storage: the choice lasts as long as the page
    }
  }

  private apply(): void {
    if (this.choice) document.documentElement.dataset.theme = this.choice;
  }
}

function stored(): Choice {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "light" || kept === "dark" ? kept : null;
  } catch {
    return null;
  }
}

export const theme = new Theme();

/** A colour of the style sheet, as it is now. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const calm = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;
