"""Results that do not depend on the version of NumPy."""

import numpy as np

from telechat_moe.tools.plan.cost.roofline import Pass


def test_times_use_no_power_of_numpy(monkeypatch):
    """NumPy 1.26 and 2.4 disagree in the last bits of powers; this result uses correctly rounded operations only."""
    fields = Pass.__dataclass_fields__
    rng = np.random.default_rng(0)
    values = Pass(**{name: rng.random(200) * 1e-3 for name in fields})
    busy, floor = values.device + 0.3 * values.host, values.host + values.wait
    exact = np.longdouble(1) * busy, np.longdouble(1) * floor
    want = (exact[0] ** 8 + exact[1] ** 8) ** (1 / np.longdouble(8))
    np.testing.assert_allclose(values.time, want.astype(float), rtol=2e-15)

    class NoPower(np.ndarray):
        def __pow__(self, other):
            raise AssertionError("np.power")

    quiet = Pass(**{name: getattr(values, name).view(NoPower) for name in fields})
    np.testing.assert_array_equal(np.asarray(quiet.time), values.time)
