"""What Beam workers run: image references in, sharded TFRecords out. Never imports TensorFlow."""
