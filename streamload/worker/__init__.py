"""Work of a DataLoader worker: the loop over its batches, sampler, reader, and the messages to its rank."""
