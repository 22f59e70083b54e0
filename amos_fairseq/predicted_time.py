"""How long the FLOPs of a training are predicted to take. Nothing is imported here: ``amos recipes`` answers at once."""

# FLOP/s of training. A100, bf16: 34 % of 312 TFLOP/s, the data sheet's peak, as `amos bench --on-paper a100` predicts for
# amos_base; not measured. CPU, float32: electra_small on two cores, 0.144 TFLOP/s, measured with amos bench on 2026-11-21;
# narrower models reach less: amos_tiny, 44,000 tokens/s of 1.45 MFLOP in the quickstart; amos_mini, 0.77 s per update of
# 0.063 TFLOP, the mean of updates 6 to 60 on 2026-11-24 while no other process ran.
A100_RATE = 0.34 * 312e12
CPU_RATE, NARROW_CPU_RATES = 0.144e12, {64: 0.064e12, 128: 0.082e12}  # up to these widths


def predicted_seconds(flops: float, width: int) -> dict[str, float]:
    """Return the seconds on one ``a100`` in bf16, and on one ``cpu`` with two cores in float32.

    Args:
        width: of the encoder.
    """
    cpu_rate = next((rate for narrow, rate in NARROW_CPU_RATES.items() if width <= narrow), CPU_RATE)
    return {"a100": flops / A100_RATE, "cpu": flops / cpu_rate}
