"""How does a call of this process reach its owner? Routing, waiting, refusing, timing out."""
