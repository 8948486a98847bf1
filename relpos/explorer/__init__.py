"""The explorer: every layer and head of a model or an encoding, in the browser. `relpos explore`, `relpos.explore`."""
