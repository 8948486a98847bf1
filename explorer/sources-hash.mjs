// Writes the hash of the page's sources beside the built files. tests/explorer/test_explorer_export.py computes it again in Python:
// where the two differ, the built files are older than their sources.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const here = import.meta.dirname;
const files = readdirSync(here, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile())
  .map((entry) => join(entry.parentPath, entry.name).slice(here.length + 1).replaceAll("\\", "/"))
  .filter((path) => !path.startsWith("node_modules/"))
  .sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
const hash = createHash("sha256");
for (const path of files) hash.update(path).update("\0").update(readFileSync(join(here, path))).update("\0");
writeFileSync(join(here, "../relpos/explorer/static/sources.sha256"), `${hash.digest("hex")}\n`);
