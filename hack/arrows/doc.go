// Package arrows holds the tests of the shape of the source tree: imports,
// sizes and comments.
package arrows
