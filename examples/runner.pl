#!/usr/bin/env perl
# A model runner in Perl, as one may be in any language: whole steps of the witness model, slots layout, greedy.
#
#     modelrunner check "process:perl examples/runner.pl"
#
# It is written from docs/json-lines.md and the clauses alone; Perl's core is all it needs.
use strict;
use warnings;
no warnings "portable";    # 64-bit numbers are meant

# -- JSON ---------------------------------------------------------------------------------------------------------
# A parser of its own, for two reasons: a batch keeps the order of num_scheduled_tokens, which most libraries forget,
# and a plan goes back as it came. An object is read as a hash, with the order of its keys under '' and its text under
# ' '; a number stays text, so that none loses digits; null, true and false are undef, 1 and 0.

sub parse { local $_ = shift; return value() }

sub value {
    /\G\s+/gc;
    my $start = pos // 0;
    if (/\G\{/gc) {
        my %object = ('' => []);
        until (/\G\s*\}/gc) {
            my $key = /\G[\s,]*(?=")/gc ? value() : die "no key at byte " . pos;
            /\G\s*:/gc or die "no colon at byte " . pos;
            push @{$object{''}}, $key;
            $object{$key} = value();
        }
        $object{' '} = substr $_, $start, pos() - $start;
        return \%object;
    }
    if (/\G\[/gc) {
        my @list;
        until (/\G\s*\]/gc) { /\G\s*,/gc; push @list, value() }
        return \@list;
    }
    return unescape($1) if /\G"((?:[^"\\]|\\.)*)"/gc;
    return $1 if /\G(-?\d[\d.eE+-]*)/gc;
    return $1 eq 'null' ? undef : $1 eq 'true' ? 1 : 0 if /\G(null|true|false)/gc;
    die "no JSON at byte $start\n";
}

sub unescape {
    my $text = shift;
    my %plain = (n => "\n", t => "\t", r => "\r", b => "\b", f => "\f");
    my $pair = sub { chr 0x10000 + ((hex($_[0]) & 0x3ff) << 10 | hex($_[1]) & 0x3ff) };    # two halves, one character
    $text =~ s{\\(?:u(d[89ab]..)\\u(d[c-f]..)|u(....)|(.))}
              {$1 ? $pair->($1, $2) : $3 ? chr hex $3 : $plain{$4} // $4}gei;
    return $text;
}

sub quote { return '"' . $_[0] =~ s/(["\\\x00-\x1f])/sprintf '\\u%04x', ord $1/ger . '"' }

sub list { return '[' . join(',', map { ref ? list(@$_) : $_ } @_) . ']' }    # of numbers, or lists of them
sub object { return '{' . join(',', map { quote($_[2 * $_]) . ":$_[2 * $_ + 1]" } 0 .. @_ / 2 - 1) . '}' }
sub refuse { die {type => $_[0], text => $_[1]} }

# -- The witness model --------------------------------------------------------------------------------------------

sub product { use integer; return $_[0] * $_[1] }    # modulo 2^64
sub sum { use integer; return $_[0] + $_[1] }
sub mix64 {
    my $x = shift;
    $x = product($x ^ ($x >> 30), 0xBF58476D1CE4E5B9);
    $x = product($x ^ ($x >> 27), 0x94D049BB133111EB);
    return $x ^ ($x >> 31);
}

sub logits {    # times 65536, of the pairs (token, position) that a query sees
    my ($vocab_size, @pairs) = @_;
    my $hidden = 0;
    for (0 .. $#pairs) {
        my ($token, $position) = @{$pairs[$_]};
        my $seen = sum(product($token, 0x9E3779B97F4A7C15), product($position, 0xC2B2AE3D27D4EB4F));
        $hidden = sum($hidden, mix64(sum($seen, product($_ + 1, 0x165667B19E3779F9))));
    }
    return map { mix64(sum($hidden, product($_, 0xD6E8FEB86659FD93))) >> 44 } 1 .. $vocab_size;
}

# -- The runner ---------------------------------------------------------------------------------------------------

my @INFO = (name => '"runner.pl"', class_path => '"runner.pl"', version => '"1"', device => '"cpu"',
    dtype => '"float32"', layout => '"slots"', noise => '"none"');
my @OFFERS = qw(generate step_record padded_batch record_logits record_kv);
my @CONFIG = qw(max_num_reqs max_num_batched_tokens max_model_len max_concurrent_batches layout noise device
    initial_free_rows record);
# Of the sampling parameters, those that are the engine's business or mean nothing to a greedy request.
my @PARAMS = qw(temperature n top_k top_p min_p seed max_tokens stop stop_token_ids ignore_eos);

sub only {
    my ($given, %known) = ($_[0], map { $_ => 1 } @_[1 .. $#_]);
    $known{$_} or refuse('CapabilityError', "$_ is not offered") for @{$given->{''}};
}

sub build {
    my $config = shift;
    only($config, @CONFIG);
    refuse('CapabilityError', 'only the slots layout') if ($config->{layout} // 'slots') ne 'slots';
    my %record = map { $_ => 1 } @{$config->{record} // []};
    refuse('CapabilityError', 'no intermediates') if $record{intermediates};
    return {config => $config, record => \%record};
}

sub load_model {
    my ($r, $model) = @_;
    my $witness = $model->{witness} // refuse('CapabilityError', 'only the witness model');
    my @groups = @{$witness->{groups} // [{}]};
    refuse('CapabilityError', 'one KV cache group without window') if @groups != 1 || $groups[0]{sliding_window};
    $r->{vocab_size} = $witness->{vocab_size} // 64;
    $r->{block_size} = $groups[0]{block_size} // 16;
    return 'null';
}

sub kv_cache_specs {
    my $size = shift->{block_size} // refuse('CallOrderError', 'no model is loaded');
    my %spec = (num_kv_heads => 1, head_size => 1, dtype => '"int64"', kind => '"token_position"');
    return object('witness.0' => object(block_size => $size, %spec));
}

sub initialize_kv_cache {
    my ($r, $cache) = @_;
    $r->{kv} = [map { [0, 0] } 1 .. $cache->{num_blocks} * $r->{block_size}];
    $r->{requests} = {};
    $r->{free_rows} = [@{$r->{config}{initial_free_rows} // [0 .. ($r->{config}{max_num_reqs} // 64) - 1]}];
    return 'null';
}

sub change_state {
    my ($r, $plan) = @_;
    my ($requests, $kv, $size) = @$r{qw(requests kv block_size)};
    my @leaving = sort map { @{$plan->{$_} // []} } qw(finished_req_ids preempted_req_ids);
    push @{$r->{free_rows}}, map { $_->{row} } grep { $_ } map { delete $requests->{$_} } @leaving;
    for my $new (@{$plan->{scheduled_new_reqs} // []}) {
        $requests->{$new->{req_id}} = {
            row => pop @{$r->{free_rows}},    # the one freed last
            computed => $new->{num_computed_tokens},    # tokens whose KV exists
            tokens => $new->{prefill_token_ids}, blocks => $new->{block_ids}[0], seed => $new->{seed} // 0,
        };
    }
    my $cached = $plan->{scheduled_cached_reqs} // {};
    for my $i (0 .. $#{$cached->{req_ids} // []}) {
        push @{$requests->{$cached->{req_ids}[$i]}{blocks}}, @{($cached->{new_block_ids}[$i] // [[]])->[0]};
    }
    for my $block (@{$plan->{new_block_ids_to_zero} // []}) { $kv->[$block * $size + $_] = [0, 0] for 0 .. $size - 1 }
    for my $copy (@{$plan->{kv_cache_block_copies} // []}) {
        $kv->[$copy->[1] * $size + $_] = $kv->[$copy->[0] * $size + $_] for 0 .. $size - 1;
    }
}

sub step {
    my ($r, $plan, $shape) = @_;
    refuse('CallOrderError', 'no step can begin now') if !$r->{kv} || $r->{batch};
    for my $params (grep { $_ } map { $_->{sampling_params} } @{$plan->{scheduled_new_reqs} // []}) {
        only($params, @PARAMS);
        refuse('CapabilityError', 'only greedy requests') if ($params->{temperature} // 1) != 0;
    }
    change_state($r, $plan);
    $r->{shown} = \my @shown;
    @shown = (plan => $plan->{' '}, runner => '"runner.pl"');    # all there is of a plan without tokens
    my $counts = $plan->{num_scheduled_tokens} // {};
    my @ids = sort { $counts->{$a} <=> $counts->{$b} } @{$counts->{''} // []};    # equal ones keep the plan's order
    return '{}' if !@ids;

    my (@batch, @starts, @ends, @inputs, @positions, @slots);
    for my $one (@batch = map { $r->{requests}{$_} } @ids) {
        my ($start, $end) = ($one->{computed}, $one->{computed} + $counts->{$ids[@ends]});
        push @starts, scalar @inputs;
        push @ends, $end;
        push @inputs, @{$one->{tokens}}[$start .. $end - 1];
        push @positions, $start .. $end - 1;
        push @slots, slots($r, $one, $start, $end);
    }
    $r->{kv}[$slots[$_]] = [$inputs[$_], $positions[$_]] for 0 .. $#inputs;    # all are written before any is read
    my @pairs = map { [@{$r->{kv}}[slots($r, $batch[$_], 0, $ends[$_])]] } 0 .. $#batch;
    my @logits = map { [logits($r->{vocab_size}, @$_)] } @pairs;
    my ($num_reqs, $num_tokens) = (scalar @batch, scalar @inputs);
    my $padded_tokens = $shape ? $shape->{num_tokens} : $num_tokens;
    my $padding = ($shape && $shape->{num_reqs} // $num_reqs) - $num_reqs;    # rows
    my $width = int((($r->{config}{max_model_len} // 1024) + $r->{block_size} - 1) / $r->{block_size});
    my @rows = map { $_->{row} } @batch;
    push @shown, descriptor => $shape->{' '} if $shape;
    push @shown, (
        num_reqs => $num_reqs, num_reqs_padded => $num_reqs + $padding,
        num_tokens => $num_tokens, num_tokens_padded => $padded_tokens,
        req_ids => list(map { quote($_) } @ids), idx_mapping => list(@rows),
        query_start_loc => list(@starts, ($num_tokens) x ($padding + 1)), seq_lens => list(@ends, (0) x $padding),
        input_ids => list(@inputs), positions => list(@positions),
        logits_indices => list((map { $_ - 1 } @starts[1 .. $#starts]), $num_tokens - 1),    # the last of each request
        cu_num_logits => list(0 .. $num_reqs), expanded_idx_mapping => list(@rows),
        expanded_local_pos => list((0) x $num_reqs), seeds => list(map { $_->{seed} } @batch),
        block_tables => list([(map { $_->{blocks} } @batch), ([(0) x $width]) x $padding]),
        slot_mappings => list([@slots, (-1) x ($padded_tokens - $num_tokens)]),
    );
    push @shown, logits => list(map { [map { sprintf '%.17g', $_ / 65536 } @$_] } @logits) if $r->{record}{logits};
    push @shown, kv => object(map { $ids[$_] => list([@{$pairs[$_]}]) } 0 .. $#ids) if $r->{record}{kv};
    @$r{qw(batch ids ends logits)} = (\@batch, \@ids, \@ends, \@logits);
    return 'null';
}

sub slots {
    my ($size, $one, $start, $end) = ($_[0]{block_size}, @_[1 .. 3]);
    return map { $one->{blocks}[$_ / $size] * $size + $_ % $size } $start .. $end - 1;
}

sub sample {
    my ($r, $request) = @_;
    $request->{$_} and refuse('CapabilityError', "$_ is not offered") for qw(grammar forced);
    my $batch = delete $r->{batch} // refuse('CallOrderError', 'no step is waiting for its tokens');
    my (@drawn, @sampled);
    for my $i (0 .. $#$batch) {
        my ($one, $logits, $best) = ($batch->[$i], $r->{logits}[$i], 0);
        $logits->[$_] > $logits->[$best] and $best = $_ for 1 .. $#$logits;
        push @drawn, [$best];
        $one->{computed} = $r->{ends}[$i];
        # Where known tokens are still to be computed, nothing is sampled.
        push @sampled, $one->{computed} == @{$one->{tokens}} ? [$best] : [];
        push @{$one->{tokens}}, @{$sampled[-1]};
    }
    push @{$r->{shown}}, token_ids => list(@drawn), num_sampled => list(map { scalar @$_ } @sampled),
        num_rejected => list((0) x @drawn);
    my @ids = map { quote($_) } @{$r->{ids}};
    return object(output => object(req_ids => list(@ids), sampled_token_ids => list(@sampled)));
}

# -- The conversation ---------------------------------------------------------------------------------------------

my (@runners, %answer);
%answer = (
    start => sub { object(spec_version => '"2026.11"', name => '"runner.pl"') },
    build => sub { push @runners, build($_[1]{config}); object(runner => $#runners) },
    describe => sub { object(@INFO, capabilities => list(map { quote($_) } @OFFERS)) },
    load_model => sub { load_model($_[0], $_[1]{model}) },
    kv_cache_specs => \&kv_cache_specs,
    initialize_kv_cache => sub { initialize_kv_cache($_[0], $_[1]{kv_cache_config}) },
    step => sub { step($_[0], $_[1]{plan}, $_[1]{descriptor}) },
    record => sub { object(@{$_[0]{shown} // refuse('CallOrderError', 'no step has run')}) },
    sample => \&sample,
    shutdown => sub { %{$_[0]} = (); 'null' },
    stop => sub { 'null' },
);

binmode $_, ':utf8' for \*STDIN, \*STDOUT;
$| = 1;
while (my $line = <STDIN>) {
    my $q = parse($line);
    my $known = $answer{$q->{op}} // sub { refuse('CapabilityError', "$q->{op} is not offered") };
    my @result = eval { (ok => $known->(defined $q->{runner} ? $runners[$q->{runner}] : undef, $q)) };
    if (my $error = $@) {
        $error = {type => 'crash', text => $error} if !ref $error;
        @result = (error => object(map { $_ => quote($error->{$_}) } qw(type text)));
    }
    print object(id => $q->{id}, @result), "\n";
    last if $q->{op} eq 'stop';
}
