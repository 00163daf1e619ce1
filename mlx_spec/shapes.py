"""The words of shape annotations: jaxtyping's where it is installed (the tests check them)."""

try:
    from jaxtyping import Bool, Float, Integer
except ImportError:  # annotations are not evaluated outside the tests
    Bool = Float = Integer = None
