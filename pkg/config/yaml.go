package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// APIVersion is the version of both files that this program reads.
const APIVersion = "kasway.dev/v1alpha1"

const (
	// maxFile bounds what is parsed; the largest allowed set of targets takes
	// a fraction of it.
	maxFile = 1 << 20
	// maxSearch bounds the lines among which a syntax error is located exactly.
	maxSearch = 500
)

// file reads the YAML document data, called name in messages, into root. It
// reports false if there is no use in looking further.
func (d *decoder) file(name string, data []byte, root shape) bool {
	whole := place{file: name, line: 1}
	d.places[""] = whole
	if len(data) > maxFile {
		d.add(place{file: name}, "", fmt.Sprintf("%d bytes long; at most %d are read", len(data), maxFile))
		return false
	}
	node, err := parseYAML(data)
	if err != nil {
		text := err.Error()
		if !errors.Is(err, errSecondDocument) {
			text = fmt.Sprintf("not valid YAML: %s; check the indentation, and put a text in quotes that holds any of [ ] { } & * # or a colon before a blank",
				yamlPrefix.ReplaceAllString(text, ""))
		}
		whole.line = errorLine(data, err)
		d.add(whole, "", text)
		return false
	}
	if node == nil {
		return true
	}
	whole.line = node.Line
	d.read(root, value{node: node, at: whole})
	return d.clean("")
}

var errSecondDocument = errors.New("a second document begins here (---); allowed: one, put the other into a file of its own")

// parseYAML returns the one document in data; nil if it is empty.
func parseYAML(data []byte) (*yaml.Node, error) {
	var document, more yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&document); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	switch err := dec.Decode(&more); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return nil, err
	default:
		return nil, errSecondDocument
	}
	if document.Content[0].ShortTag() == "!!null" {
		return nil, nil
	}
	return document.Content[0], nil
}

// What the YAML library puts in front of its messages. Its line is often that
// of the section around the fault, and counted from 0 or 1.
var yamlPrefix = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// errorLine is the line from which on data cannot be read any more: all before
// it is a valid document.
func errorLine(data []byte, err error) int {
	lines := bytes.SplitAfter(data, []byte("\n"))
	if len(lines) > maxSearch {
		line := 1
		if m := yamlPrefix.FindStringSubmatch(err.Error()); m != nil && m[1] != "" {
			line, _ = strconv.Atoi(m[1]) // digits alone
		}
		return line
	}
	for end, n := len(data), len(lines); n > 1; n-- {
		end -= len(lines[n-1])
		if _, err := parseYAML(data[:end]); err == nil {
			return n
		}
	}
	return 1
}
