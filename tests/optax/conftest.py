"""JAX before 0.8 has `enable_x64`, which only the tests use, in `jax.experimental`."""

import jax

if not hasattr(jax, "enable_x64"):
    from jax.experimental import enable_x64

    jax.enable_x64 = enable_x64
