"""The benchmark behind `python -m mha_ext bench`; not part of the API. Needs the extra "bench"."""
