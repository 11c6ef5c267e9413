"""Code that all packages of the project share, such as errors and model folders. It imports none of them."""
