"""Random tests draw the same examples in every run; `pytest --hypothesis-profile=default` draws others."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["run_fixtures"]
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")
