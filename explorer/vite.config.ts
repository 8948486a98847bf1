import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The page may be served below a prefix (a notebook's proxy), so it names its files relative to itself.
const staticFolder = {
  name: "static-folder",
  transformIndexHtml: {
    order: "post" as const,
    handler: (html: string) => html.replaceAll('"./app.', '"./static/app.').replaceAll(" crossorigin", ""),
  },
};

export default defineConfig({
  base: "./",
  plugins: [
    // Names of scoped classes come from the styles, not from the folder of the build: same sources, same bytes.
    svelte({ compilerOptions: { cssHash: ({ hash, css }) => `s-${hash(css)}` } }),
    staticFolder,
  ],
  build: {
    outDir: "../relpos/explorer/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "app.[ext]", codeSplitting: false },
    },
  },
  test: { include: ["tests/**/*.test.ts"], environment: "node" },
} as Parameters<typeof defineConfig>[0]);
