"""mha_ext inside other libraries. Each module needs its library, and imports it only when it is used."""
