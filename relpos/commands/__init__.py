"""The subcommands of `relpos`, a file a group. Nothing heavy is imported before a command runs."""
