"""The subcommands of `relpos`, one file per group. Nothing heavy is imported before a command runs."""
