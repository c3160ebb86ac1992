"""C++ operators for CPUs: `build` compiles and loads them, `table` puts them into an operator table."""
