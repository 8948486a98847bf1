"""Numbers of layers in words."""


def layer_numbers(numbers: list[int], total: int) -> str:
    """Some of the layers 1 to total: "layer 3", "layers 1–30", "layers 1–26 but every 6th", "every 4th layer".

    Args:
        numbers: Of the layers, ascending.
        total: How many layers there are.
    """
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    ranges = as_ranges(numbers)
    if len(ranges) > 2:
        step = numbers[0]
        if step > 1 and numbers == list(range(step, total + 1, step)):
            return f"every {ordinal(step)} layer"
        others = sorted(set(range(1, total + 1)) - set(numbers))
        if others and others[0] > 1 and others == list(range(others[0], total + 1, others[0])):
            return f"layers 1–{total} but every {ordinal(others[0])}"
        first, step = numbers[0], numbers[1] - numbers[0]
        if numbers == list(range(first, numbers[-1] + 1, step)):
            return f"every {ordinal(step)} layer from {first} to {numbers[-1]}"
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
