"""From files to packed batches: sources -> records -> tokens -> store -> packing -> stream."""
