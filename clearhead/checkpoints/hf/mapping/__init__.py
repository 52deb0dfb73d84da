"""How a family is described: config keys to a spec and back, tensor names to the slots of a module and back."""
