"""The pages of the faults that `relpos check` recognises: all of it follows from their files."""

from relpos.checking.faults import FILES, faults
from relpos.checking.faults.fault import Fault


def pages() -> dict[str, Fault]:
    """The faults by the path of their page."""
    return {f"faults/{file}.md": fault for file, fault in zip(FILES, faults(), strict=True)}


def overview() -> str:
    """A table of all faults."""
    rows = [f"| [{fault.name}]({path}) | {', '.join(fault.tests)} | {fault.title} |" for path, fault in pages().items()]
    return "\n".join(["| fault | found by the test | what is wrong |", "|---|---|---|", *rows])


def page(fault: Fault) -> str:
    """The page of one fault."""
    parts = [
        f"# {fault.name}",
        fault.diagnosis,
        f"**What mends it.** {fault.remedy}",
        f"**Found by** [relpos check](../check.md): {', '.join(f'`{name}`' for name in fault.tests)}.",
    ]
    if fault.also:
        parts.append(f"**Tests that often fail with it:** {', '.join(f'`{name}`' for name in fault.also)}.")
    if fault.threads:
        links = "\n".join(f"- [{thread.removeprefix('https://github.com/')}]({thread})" for thread in fault.threads)
        parts.append(f"## Where it happened\n\n{links}")
    return "\n\n".join(parts) + "\n"
