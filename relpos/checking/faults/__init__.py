"""The library of faults: one file per kind, with how it is injected, how it is told, what it means and what mends it.

To add one: write its file with a `FAULT`, and add its name to `FILES`.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace

from relpos.checking.faults.fault import Fault
from relpos.checking.findings import FAILED, Finding

FILES = (  # in the order in which they are asked: what explains more comes first
    *("boolean_mask", "causal_mask_shifted", "causal_mask_missing", "encoder_causal"),
    *("layout", "rotation_missing", "rotation_backwards", "keys_unrotated", "keys_backwards"),
    *("nope_rotated", "other_layer"),
    *("bfloat16_positions", "bfloat16_frequencies", "scaling_inverted", "scaling_missing", "fraction", "theta"),
    *("factor_missing", "factor_twice"),
    *("window_layers", "window_shifted", "window_missing", "window_everywhere", "sinks_missing"),
    *("slopes_reversed", "slopes_of_rank", "bias_sign", "bias_twice", "bias_scaled", "bias_first_layer"),
    *("bucket_direction", "bucket_sides", "bucket_reach"),
    *("table_shifted", "table_missing"),
    *("cache_restart", "cache_shifted", "cache_mask", "cache_window"),
    *("padding_seen", "padding_counted", "packing_leak"),
)


def faults() -> list[Fault]:
    """All faults, in the order in which they are asked whether a finding is theirs."""
    return [importlib.import_module(f"relpos.checking.faults.{name}").FAULT for name in FILES]


def diagnosed(findings: Sequence[Finding]) -> list[Finding]:
    """Name the faults that explain failed findings; findings that follow from a named fault say so."""
    results = list(findings)
    named: list[Fault] = []
    for place, finding in enumerate(findings):
        if finding.status != FAILED:
            continue
        cause = next((fault for fault in named if finding.test in (*fault.also, "ports")), None)
        if cause is not None:
            results[place] = replace(finding, diagnosis=f"Follows from: {cause.title}.", remedy="")
            continue
        fault = next((fault for fault in faults() if finding.test in fault.tests and fault.claims(finding)), None)
        if fault is not None:
            results[place] = replace(finding, fault=fault.name, diagnosis=fault.diagnosis, remedy=fault.remedy)
            named.append(fault)
    return results
