"""Numbers of layers in words."""


def layer_numbers(numbers: list[int], total: int) -> str:
    """Some of the layers 1 to total: "layer 3", "layers 1–30", "every 4th layer", "layers 1–26 but every 6th".

    Args:
        numbers: Of the layers, ascending.
        total: How many layers there are.
    """
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    ranges = as_ranges(numbers)
    if len(ranges) > 2:
        others = [number for number in range(1, total + 1) if number not in numbers]
        for regular, before in ((numbers, "every {} layer"), (others, f"layers 1–{total} but every {{}}")):
            step = regular[1] - regular[0] if len(regular) > 1 else 0
            if step > 1 and regular == list(range(regular[0], total + 1, step)):
                start = "" if regular[0] == step else f" from {regular[0]} on"
                return before.format(ordinal(step)) + start
    return "layers " + ", ".join(ranges)


def as_ranges(numbers: list[int]) -> list[str]:
    """Ascending numbers as ranges: "1–3", "7"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return [f"{start}" if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True)]


def ordinal(number: int) -> str:
    """2nd, 3rd, 4th."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
